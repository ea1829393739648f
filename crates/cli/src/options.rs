//! Flags that several subcommands share, spelled the same in each.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fusestep_cpu::CpuBackend;
use fusestep_launch::{Backend, LaunchLimits, Master, Precision, Rounding, StateDType};
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Planner, TableKind, UpdateNorms};
use fusestep_simd::{MAX_THREADS, Pool};
use fusestep_tensor::{DType, ParamDesc, Quoted};
use rayon::ThreadPoolBuilder;

use crate::ranks::whole;

/// The name that a flag's value has on the command line.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Reads one of these values by its name; the texts are for `--help`.
pub(crate) fn named<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, T, &'static str); N],
) -> impl TypedValueParser<Value = T> {
    let names = values.map(|(name, _, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(move |given| {
        let found = values.iter().find(|(name, ..)| *name == given);
        found.map(|(_, value, _)| *value).ok_or("no such value")
    })
}

/// How exactly parameters and state are kept.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PrecisionArgs {
    /// What f16 and bf16 parameters have beside them
    #[arg(long, default_value = "none", value_parser = named([
        ("none", Master::None, "Nothing"),
        ("f32", Master::F32, "An f32 copy, which is updated"),
        ("remainder", Master::Remainder, "16 bits that make a bf16 parameter an f32 again"),
    ]))]
    pub(crate) master_weights: Master,
    /// Element type of optimizer state
    #[arg(long, default_value = "f32", value_parser = named([
        ("f32", StateDType::Compute, "f32, or f64 for f64 parameters"),
        ("bf16", StateDType::Bf16, "bf16"),
    ]))]
    pub(crate) state_dtype: StateDType,
    /// How bf16 state, and bf16 parameters without master weights, are rounded
    #[arg(long, default_value = "nearest", value_parser = named([
        ("nearest", Rounding::Nearest, "To nearest, ties to even"),
        (
            "stochastic",
            Rounding::Stochastic { seed: 0 },
            "At random, with the exact value as the mean",
        ),
    ]))]
    pub(crate) rounding: Rounding,
    /// Start of the random numbers of stochastic rounding
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = whole::<u64, 0, { u64::MAX }>
    )]
    pub(crate) rounding_seed: u64,
}

impl PrecisionArgs {
    /// The precision asked for.
    pub(crate) fn precision(&self) -> Precision {
        Precision {
            master: self.master_weights,
            state: self.state_dtype,
            rounding: match self.rounding {
                Rounding::Nearest => Rounding::Nearest,
                Rounding::Stochastic { .. } => Rounding::Stochastic { seed: self.rounding_seed },
            },
        }
    }

    /// The planner for these parameters. In a model of 16-bit and wider parameters only the former
    /// have master weights, and only what is bf16 is rounded at random; a model without 16-bit
    /// parameters that asks for them is left to the planner's refusal.
    pub(crate) fn planner(&self, planner: Planner, params: &[ParamDesc]) -> Planner {
        let asked = self.precision();
        let planner = planner.precision(asked);
        let narrow = |param: &ParamDesc| matches!(param.dtype, DType::F16 | DType::BF16);
        if !params.iter().any(narrow) {
            return planner;
        }
        let wide = Precision {
            master: Master::None,
            rounding: match asked.state {
                StateDType::Compute => Rounding::Nearest,
                StateDType::Bf16 => asked.rounding,
            },
            ..asked
        };
        [DType::F32, DType::F64]
            .into_iter()
            .fold(planner, |planner, dtype| planner.precision_of(dtype, wide))
    }
}

/// How tensors are put into launches; none of it changes a result.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct PlanningArgs {
    /// Bytes of arguments one launch may carry: at most 32764 on a CUDA device
    /// [default: the backend's]
    #[arg(long, value_name = "BYTES", value_parser = whole::<usize, 1, { u64::MAX }>)]
    pub(crate) argument_bytes: Option<usize>,
    /// Where the tables of a device's launches lie; the cpu has none
    #[arg(long, default_value = "arguments", value_parser = named([
        (
            "auto",
            TableKind::Auto,
            "In the arguments where each stage fits into one launch, else resident",
        ),
        (
            "arguments",
            TableKind::Arguments,
            "In the arguments, as many tensors as fit; the host derives the scalars of a step",
        ),
        (
            "resident",
            TableKind::Resident,
            "In the device's memory, any number of tensors; the device derives the scalars",
        ),
    ]))]
    pub(crate) table: TableKind,
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
        let planner = Planner::new(rule).limits(limits).table(self.table);
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

impl BackendName {
    /// Refuses what this build leaves out.
    pub(crate) fn is_built(self) -> anyhow::Result<()> {
        match self {
            #[cfg(not(feature = "cuda"))]
            BackendName::Cuda => anyhow::bail!(NO_CUDA),
            _ => Ok(()),
        }
    }

    /// That of one rank, of so many threads, or on the GPU that its engine gives it.
    pub(crate) fn of_rank(
        self,
        threads: usize,
        gpu: Option<u32>,
    ) -> anyhow::Result<Box<dyn Backend>> {
        Ok(match self {
            BackendName::Cpu => {
                let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
                Box::new(CpuBackend::new(threads))
            }
            BackendName::Cuda => cuda(gpu.unwrap_or(0), None)?,
        })
    }
}

/// Where a step runs.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct BackendArgs {
    /// Where the step runs
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendName,
    /// Threads of the cpu backend, 256 at most [default: RAYON_NUM_THREADS, which is held to the
    /// same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
}

impl BackendArgs {
    /// The backend with the limits asked for, or why there is none.
    pub(crate) fn open(&self, planning: &PlanningArgs) -> anyhow::Result<Box<dyn Backend>> {
        match self.backend {
            BackendName::Cpu => {
                let cpu = CpuBackend::in_pool(pool(self.threads)?);
                Ok(Box::new(cpu.with_limits(planning.limits())))
            }
            BackendName::Cuda => cuda(0, planning.argument_bytes),
        }
    }
}

/// What a build without CUDA says.
#[cfg(not(feature = "cuda"))]
pub(crate) const NO_CUDA: &str = "cuda: device 0 cannot be opened: this build leaves CUDA out; \
                                  build with the feature `cuda`, or use the cpu backend";

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: Option<usize>) -> anyhow::Result<Box<dyn Backend>> {
    anyhow::bail!(NO_CUDA)
}

/// A device, with the limit asked for as far as it has it.
#[cfg(feature = "cuda")]
fn cuda(index: u32, argument_bytes: Option<usize>) -> anyhow::Result<Box<dyn Backend>> {
    let cuda = fusestep_cuda::CudaBackend::open(index)?;
    let most = cuda.limits();
    let argument_bytes = argument_bytes.unwrap_or(most.argument_bytes);
    anyhow::ensure!(
        argument_bytes <= most.argument_bytes,
        "--argument-bytes: expected at most {} on this device, found {argument_bytes}",
        most.argument_bytes
    );
    Ok(Box::new(cuda.with_limits(LaunchLimits { argument_bytes, ..most })))
}

/// Reads a number of threads that a pool can have.
pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse::<NonZeroUsize>().ok();
    threads
        .filter(|threads| threads.get() <= MAX_THREADS)
        .ok_or_else(|| format!("expected a number of threads from 1 to {MAX_THREADS}"))
}

/// Where rayon looks for its pool's threads, one after the other.
const RAYON: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];

/// Refuses numbers of threads in the environment that --threads would refuse: rayon takes any,
/// and starts as many, or ignores without a word what is no number.
pub(crate) fn require_threads_of_environment() -> anyhow::Result<()> {
    for variable in RAYON {
        let Some(value) = std::env::var_os(variable) else {
            continue;
        };
        let value = value.to_string_lossy();
        // As rayon documents it, 0 is as many as there are processors; so is nothing.
        ensure!(
            matches!(&*value, "" | "0") || parse_threads(&value).is_ok(),
            "{variable}: expected a number of threads from 1 to {MAX_THREADS}, or 0 for all \
             processors, found `{}`",
            Quoted(&value)
        );
    }
    Ok(())
}

/// The threads asked for, or as many as rayon's pool has.
pub(crate) fn threads(asked: Option<NonZeroUsize>) -> NonZeroUsize {
    let all = || NonZeroUsize::new(rayon::current_num_threads());
    asked.or_else(all).unwrap_or(NonZeroUsize::MIN)
}

/// So many threads: those of rayon's pool, or of one of its own if more are asked for.
pub(crate) fn pool(asked: Option<NonZeroUsize>) -> anyhow::Result<Pool> {
    let threads = threads(asked);
    if threads.get() <= rayon::current_num_threads() {
        return Ok(Pool::new(threads));
    }
    let own = ThreadPoolBuilder::new().num_threads(threads.get());
    Ok(Pool::of(Arc::new(own.build().context("--threads")?)))
}

/// Reads an element type that parameters can have.
pub(crate) fn param_dtype() -> impl TypedValueParser<Value = DType> {
    named([
        ("f32", DType::F32, "IEEE 754 binary32"),
        ("f64", DType::F64, "IEEE 754 binary64"),
        ("f16", DType::F16, "IEEE 754 binary16"),
        ("bf16", DType::BF16, "The upper half of a binary32"),
    ])
}

/// Clipping, loss scaling, and norms of updates.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct GradientArgs {
    /// Largest norm of all gradients together; larger ones are scaled down to it
    #[arg(long, value_name = "NORM", allow_hyphen_values = true, value_parser = parse_norm)]
    pub(crate) clip_norm: Option<f64>,
    /// Factor that the loss was multiplied with, a power of two, or `dynamic`; a step with a
    /// gradient that is not finite is skipped
    #[arg(long, value_name = "SCALE|dynamic", allow_hyphen_values = true)]
    pub(crate) loss_scale: Option<ScaleArg>,
    /// Measure how far each parameter moves in a step, ‖new − old‖, as the update writes it
    #[arg(long)]
    pub(crate) update_norms: bool,
}

impl GradientArgs {
    /// Whether no flag was given.
    pub(crate) fn none(&self) -> bool {
        self.clip_norm.is_none() && self.loss_scale.is_none() && !self.update_norms
    }

    /// The planner with the passes asked for; their values are checked when a plan is made.
    pub(crate) fn passes(&self, mut planner: Planner) -> Planner {
        if let Some(max_norm) = self.clip_norm {
            planner = planner.with(ClipByGlobalNorm::new(max_norm));
        }
        if self.update_norms {
            planner = planner.with(UpdateNorms);
        }
        match self.loss_scale {
            Some(ScaleArg::Dynamic) => planner.with(LossScaling::dynamic()),
            Some(ScaleArg::Fixed(scale)) => planner.with(LossScaling::fixed(scale)),
            None => planner,
        }
    }
}

/// Reads a norm that gradients can be held to.
fn parse_norm(text: &str) -> Result<f64, String> {
    let norm = text.parse::<f64>().ok();
    norm.filter(|norm| norm.is_finite() && *norm > 0.0).ok_or_else(|| {
        "expected a finite number above 0; leave the flag out to clip nothing".to_owned()
    })
}

/// A loss scale as it is given on the command line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScaleArg {
    /// Starts at 65,536 and follows the steps.
    Dynamic,
    /// Stays.
    Fixed(f64),
}

impl FromStr for ScaleArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "dynamic" {
            return Ok(ScaleArg::Dynamic);
        }
        match text.parse() {
            Ok(scale) => Ok(ScaleArg::Fixed(scale)),
            Err(_) => bail!("expected a power of two or `dynamic`, found \"{}\"", Quoted(text)),
        }
    }
}

impl fmt::Display for ScaleArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScaleArg::Dynamic => f.write_str("dynamic"),
            ScaleArg::Fixed(scale) => scale.fmt(f),
        }
    }
}
