//! Flags that several subcommands share, spelled the same in each.

use std::num::NonZeroUsize;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use fusestep_cpu::CpuBackend;
use fusestep_cuda::CudaBackend;
use fusestep_fused_adam::{Adam, Objective, SecondMoment, WeightDecay};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars};
use fusestep_launch::{Backend, LaunchLimits};
use fusestep_planner::{Optimizer, Planner};
use fusestep_simd::MAX_THREADS;
use fusestep_tensor::ParamDesc;

/// The update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam with L2 regularisation
    Adam,
    /// Momentum with a rate for each layer: LARS
    Lars,
    /// Adam with a rate for each layer: LAMB
    Lamb,
}

/// Which learning rate tensors take that --exclude names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExcludedRate {
    /// The plain one
    PlainLr,
    /// The one scaled by the trust ratio
    TrustRatio,
}

/// The update rule and its hyper-parameters.
#[derive(Clone, Debug, Args)]
pub(crate) struct OptimizerArgs {
    /// Update rule
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: Rule,
    /// Learning rate per step, at least 0
    #[arg(long, default_value_t = 1e-3, allow_hyphen_values = true)]
    pub(crate) lr: f64,
    /// Decay of the first moment, in [0, 1)
    #[arg(long, default_value_t = 0.9, allow_hyphen_values = true)]
    pub(crate) beta1: f64,
    /// Decay of the second moment, in [0, 1)
    #[arg(long, default_value_t = 0.999, allow_hyphen_values = true)]
    pub(crate) beta2: f64,
    /// Added to the root of the second moment, or to the trust ratio's denominator, at least 0 [default: 1e-8 for adam and adamw,
    /// 1e-6 for lamb, 0 for lars]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,
    /// Weight decay, at least 0 [default: 0.01 for adamw and lamb, 0 for adam, 0.0005 for lars]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) weight_decay: Option<f64>,
    /// Decay of the velocity of lars, in [0, 1)
    #[arg(long, default_value_t = 0.9, allow_hyphen_values = true)]
    pub(crate) momentum: f64,
    /// Factor on the trust ratio of lars, at least 0
    #[arg(long, default_value_t = 0.001, allow_hyphen_values = true)]
    pub(crate) trust_coefficient: f64,
    /// No weight decay for parameters whose name contains this; may be repeated
    #[arg(long, value_name = "SUBSTRING")]
    pub(crate) exclude: Vec<String>,
    /// Learning rate that lars and lamb give parameters without weight decay
    #[arg(long, value_enum, default_value = "plain-lr")]
    pub(crate) excluded: ExcludedRate,
    /// Scale the step by the largest second moment so far
    #[arg(long)]
    pub(crate) amsgrad: bool,
    /// Step along the gradient instead of against it
    #[arg(long)]
    pub(crate) maximize: bool,
}

impl OptimizerArgs {
    /// The rule; its values are checked when a plan is made.
    pub(crate) fn rule(&self) -> Optimizer {
        match self.optimizer {
            Rule::Adamw => self.adam(WeightDecay::Decoupled(self.weight_decay.unwrap_or(0.01))),
            Rule::Adam => self.adam(WeightDecay::L2(self.weight_decay.unwrap_or(0.0))),
            Rule::Lars => Optimizer::Lars(self.lars()),
            Rule::Lamb => Optimizer::Lamb(self.lamb()),
        }
    }

    /// Takes weight decay off the parameters that --exclude names; a pattern that names none is warned of.
    pub(crate) fn exclude(&self, params: &mut [ParamDesc]) {
        for pattern in &self.exclude {
            let mut matches = 0;
            for param in params.iter_mut() {
                if param.name.contains(pattern.as_str()) {
                    param.weight_decay = Some(0.0);
                    matches += 1;
                }
            }
            if matches == 0 {
                eprintln!(
                    "warning: --exclude `{pattern}`: expected a part of a parameter's name, found it in none of {}",
                    params.len()
                );
            }
        }
    }

    fn lars(&self) -> Lars {
        let default = Lars::default();
        Lars {
            lr: self.lr,
            momentum: self.momentum,
            trust_coefficient: self.trust_coefficient,
            weight_decay: self.weight_decay.unwrap_or(default.weight_decay),
            eps: self.eps.unwrap_or(default.eps),
            excluded: self.excluded.into(),
            ..default
        }
    }

    fn lamb(&self) -> Lamb {
        let default = Lamb::default();
        Lamb {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps.unwrap_or(default.eps),
            weight_decay: self.weight_decay.unwrap_or(default.weight_decay),
            excluded: self.excluded.into(),
        }
    }

    fn adam(&self, weight_decay: WeightDecay) -> Optimizer {
        Optimizer::Adam(Adam {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps.unwrap_or(Adam::default().eps),
            weight_decay,
            second_moment: match self.amsgrad {
                true => SecondMoment::Largest,
                false => SecondMoment::Running,
            },
            objective: match self.maximize {
                true => Objective::Maximize,
                false => Objective::Minimize,
            },
        })
    }
}

impl From<ExcludedRate> for Excluded {
    fn from(rate: ExcludedRate) -> Self {
        match rate {
            ExcludedRate::PlainLr => Excluded::PlainLr,
            ExcludedRate::TrustRatio => Excluded::TrustRatio,
        }
    }
}

/// How tensors are put into launches; none of it changes a result.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PlanningArgs {
    /// Bytes of arguments one launch may carry: 4096 on any CUDA device, 32764 on newer ones [default: the backend's]
    #[arg(long, value_name = "BYTES")]
    pub(crate) argument_bytes: Option<usize>,
    /// One launch per tensor, no pass
    #[arg(long)]
    pub(crate) naive: bool,
}

impl PlanningArgs {
    /// The limits asked for, else the default ones.
    pub(crate) fn limits(&self) -> LaunchLimits {
        let default = LaunchLimits::default();
        LaunchLimits {
            argument_bytes: self.argument_bytes.unwrap_or(default.argument_bytes),
            ..default
        }
    }

    pub(crate) fn planner(&self, rule: Optimizer, limits: LaunchLimits) -> Planner {
        let planner = Planner::new(rule).limits(limits);
        if self.naive { planner.naive() } else { planner }
    }
}

/// Where a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Host memory, SIMD and threads
    Cpu,
    /// A CUDA device
    Cuda,
}

/// Where a step runs.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct BackendArgs {
    /// Where the step runs
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendName,
    /// Threads of the cpu backend [default: all]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
}

impl BackendArgs {
    /// The backend with the limits asked for, or why there is none.
    pub(crate) fn open(&self, planning: &PlanningArgs) -> anyhow::Result<Box<dyn Backend>> {
        match self.backend {
            BackendName::Cpu => {
                let cpu = CpuBackend::new(threads(self.threads))?;
                Ok(Box::new(cpu.with_limits(planning.limits())))
            }
            BackendName::Cuda => {
                let cuda = CudaBackend::open(0)?;
                let most = cuda.limits();
                let argument_bytes = planning.argument_bytes.unwrap_or(most.argument_bytes);
                ensure!(
                    argument_bytes <= most.argument_bytes,
                    "--argument-bytes: expected at most {} on this device, found {argument_bytes}",
                    most.argument_bytes
                );
                Ok(Box::new(cuda.with_limits(LaunchLimits {
                    argument_bytes,
                    ..most
                })))
            }
        }
    }
}

/// Reads a number of threads that a team can have.
pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse::<NonZeroUsize>().ok();
    threads
        .filter(|threads| threads.get() <= MAX_THREADS)
        .ok_or_else(|| format!("expected a number of threads from 1 to {MAX_THREADS}"))
}

/// The threads asked for, or all of the machine.
pub(crate) fn threads(asked: Option<NonZeroUsize>) -> NonZeroUsize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN))
}

/// Element types that parameters can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ParamDType {
    /// IEEE 754 binary32
    F32,
    /// IEEE 754 binary64
    F64,
}

impl From<ParamDType> for fusestep_tensor::DType {
    fn from(dtype: ParamDType) -> Self {
        match dtype {
            ParamDType::F32 => fusestep_tensor::DType::F32,
            ParamDType::F64 => fusestep_tensor::DType::F64,
        }
    }
}
