//! What is asked for, rule by rule, before anything is planned.

use std::num::{NonZeroU32, NonZeroU64};

use fusestep_launch::{LaunchLimits, Precision, WeightDecay};
use fusestep_planner::{
    ClipByGlobalNorm, Comms, FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, LocalSgd,
    LossScaling, Optimizer, Planner, Reach, Schedule, Shard, Topology, UpdateInBackward, ZeroStage,
};
use fusestep_tensor::ParamDesc;

use crate::{Device, Error, FusedOptimizer};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// An update rule as its name promises it, at one learning rate.
pub trait Kind {
    /// The rule with its settings.
    type Rule: Copy + std::fmt::Debug + Into<Optimizer>;

    /// The rule with its defaults.
    fn rule(lr: f64) -> Self::Rule;
}

/// Kinds of rules, each with its builder, its type and where its defaults differ from the type's.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident of $crate_name:ident::$rule:ident
        $({ $($field:ident: $value:expr),* })?;)*) => {
        /// The kinds of rules that builders have.
        pub mod kinds {
            $($(#[$doc])* #[derive(Debug)] pub struct $kind;)*
        }

        $(
            impl Kind for kinds::$kind {
                type Rule = $crate_name::$rule;

                fn rule(lr: f64) -> Self::Rule {
                    Self::Rule {
                        lr,
                        $($($field: $value,)*)?
                        ..Default::default()
                    }
                }
            }

            $(#[$doc])*
            pub type $kind = Builder<kinds::$kind>;
        )*
    };
}

kinds! {
    /// AdamW: Adam with decoupled weight decay, 0.01 unless settings say otherwise.
    AdamW of fusestep_fused_adam::Adam;
    /// Adam without weight decay.
    Adam of fusestep_fused_adam::Adam { weight_decay: WeightDecay::L2(0.0) };
    /// Stochastic gradient descent; settings give it momentum.
    Sgd of fusestep_fused_sgd::Sgd;
    /// Lion: the sign of a moving mean.
    Lion of fusestep_lion::Lion;
    /// Adagrad: steps scaled by the sum of squared gradients.
    Adagrad of fusestep_adagrad::Adagrad;
    /// RMSprop: steps scaled by a moving mean of squared gradients.
    RmsProp of fusestep_rmsprop::RmsProp;
    /// Schedule-Free AdamW: an average of the iterates in place of a schedule.
    ScheduleFree of fusestep_schedule_free::ScheduleFree;
    /// LARS: momentum with a rate for each layer.
    Lars of fusestep_lars_momentum::Lars;
    /// LAMB: Adam with a rate for each layer.
    Lamb of fusestep_lamb::Lamb;
}

/// An update rule and what is done around it; [`Builder::build`] makes an optimizer of it.
///
/// Values are checked when the plan is made.
#[derive(Debug)]
pub struct Builder<K: Kind> {
    rule: K::Rule,
    asked: Asked,
}

/// What is asked for beside the rule.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    clip_norm: Option<f64>,
    loss_scaling: Option<LossScaling>,
    zero: u8,
    accumulate: Option<u32>,
    bucket_cap_mib: Option<f64>,
    comm_streams: Option<usize>,
    local_sgd: Option<u64>,
    precision: Precision,
    groups: Vec<(Vec<String>, Optimizer)>,
    schedule: Option<Schedule>,
    update_in_backward: bool,
}

impl<K: Kind> Builder<K> {
    /// The rule with its defaults at this learning rate.
    pub fn new(lr: f64) -> Self {
        Self { rule: K::rule(lr), asked: Asked::default() }
    }

    /// Changes the rule's own settings: `AdamW::new(1e-3).settings(|adam| adam.beta2 = 0.95)`.
    pub fn settings(mut self, change: impl FnOnce(&mut K::Rule)) -> Self {
        change(&mut self.rule);
        self
    }

    /// Scales gradients down whose norm, of all together, is larger.
    pub fn clip_norm(mut self, max_norm: f64) -> Self {
        self.asked.clip_norm = Some(max_norm);
        self
    }

    /// Takes the loss scale out of gradients, and skips steps with one that is not finite.
    pub fn loss_scale(mut self, scaling: LossScaling) -> Self {
        self.asked.loss_scaling = Some(scaling);
        self
    }

    /// What ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too; 0 is nothing.
    pub fn zero(mut self, stage: u8) -> Self {
        self.asked.zero = stage;
        self
    }

    /// Adds the gradients of this many micro-steps before each update.
    pub fn accumulate(mut self, micro_steps: u32) -> Self {
        self.asked.accumulate = Some(micro_steps);
        self
    }

    /// Most MiB of gradients that one call between ranks reduces, and that one rank updates in
    /// backward at once; 25 by default.
    pub fn bucket_cap_mib(mut self, cap_mib: f64) -> Self {
        self.asked.bucket_cap_mib = Some(cap_mib);
        self
    }

    /// Reduces buckets on so many streams while gradients are still being given. By default 2, and
    /// 0 where ranks see each other's memory: there a bucket is reduced and updated in one
    /// pass.
    pub fn comm_streams(mut self, streams: usize) -> Self {
        self.asked.comm_streams = Some(streams);
        self
    }

    /// Promises that a backward pass reads no parameter of a bucket once all gradients of that
    /// bucket are given: it is reduced and updated at once then, by the call that gives the last
    /// of them, and [`FusedOptimizer::step`] does what is left. The bits stay.
    ///
    /// Not with clipping, loss scaling or ZeRO stage 3, nor with LARS and LAMB on several ranks,
    /// which have to know all gradients first.
    pub fn update_in_backward(mut self) -> Self {
        self.asked.update_in_backward = true;
        self
    }

    /// Averages parameters every this many steps in place of gradients every step.
    pub fn local_sgd(mut self, every: u64) -> Self {
        self.asked.local_sgd = Some(every);
        self
    }

    /// How exactly parameters and state are kept.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.asked.precision = precision;
        self
    }

    /// Gives some parameters a rule of their own.
    pub fn group(
        mut self,
        names: impl IntoIterator<Item = impl Into<String>>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        self.asked.groups.push((names, rule.into()));
        self
    }

    /// Multiplies the learning rate, each group's own, by the schedule's factor at every update:
    /// `.schedule(Schedule::warmup(100).then(Schedule::cosine(900)))`. The factor follows from the
    /// step count, so that a run that is resumed goes on in the middle of it.
    pub fn schedule(mut self, schedule: impl Into<Schedule>) -> Self {
        self.asked.schedule = Some(schedule.into());
        self
    }

    /// An optimizer of these parameters, of one rank until [`FusedOptimizer::on`] says otherwise.
    /// Parameters are zero until [`FusedOptimizer::set_param`]; memory is allocated when it is
    /// first used.
    ///
    /// # Errors
    /// A setting or descriptor out of range, and whatever else the planner refuses; each names what
    /// is wrong.
    pub fn build(
        self,
        params: &[ParamDesc],
        device: impl Device + 'static,
    ) -> Result<FusedOptimizer<'static>, Error> {
        FusedOptimizer::new(self.rule.into(), self.asked, params, Box::new(device))
    }
}

impl Asked {
    /// The planner with the passes asked for.
    pub(crate) fn planner(
        &self,
        rule: Optimizer,
        limits: LaunchLimits,
        topology: Topology,
    ) -> Result<Planner, Error> {
        let mut planner = Planner::new(rule).limits(limits).precision(self.precision);
        for (names, rule) in &self.groups {
            planner = planner.group(names.iter().cloned(), *rule);
        }
        if let Some(schedule) = &self.schedule {
            planner = planner.schedule(schedule.clone());
        }
        if let Some(max_norm) = self.clip_norm {
            planner = planner.with(ClipByGlobalNorm::new(max_norm));
        }
        if let Some(scaling) = self.loss_scaling {
            planner = planner.with(scaling);
        }
        if let Some(micro_steps) = self.accumulate {
            let every = NonZeroU32::new(micro_steps).ok_or_else(|| at_least_1("accumulate"))?;
            planner = planner.with(GradientAccumulation::every(every));
        }
        if let Some(steps) = self.local_sgd {
            let every = NonZeroU64::new(steps).ok_or_else(|| at_least_1("local_sgd"))?;
            planner = planner.with(LocalSgd::every(every));
        }
        let zero = ZeroStage::of(self.zero)
            .ok_or_else(|| format!("zero: expected a stage from 0 to 3, found {}", self.zero))?;
        if zero != ZeroStage::None {
            planner = planner.with(Shard::new(zero));
        }
        let cap_bytes = match self.bucket_cap_mib {
            None => FuseAllReduce::DEFAULT_CAP_BYTES,
            Some(mib) if mib > 0.0 && mib.is_finite() => (mib * MIB) as u64,
            Some(mib) => {
                return Err(format!("bucket_cap_mib: expected more than 0, found {mib}").into());
            }
        };
        if self.update_in_backward {
            planner = planner.with(UpdateInBackward::of_bytes(cap_bytes));
        }
        if topology.world == 1 {
            return Ok(planner);
        }
        planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
        Ok(if self.streams(topology) == 0 { planner.with(FuseReduceIntoUpdate) } else { planner })
    }

    /// Communication streams of a rank.
    pub(crate) fn streams(&self, topology: Topology) -> usize {
        let default = match topology.reach {
            Reach::SharedMemory => 0,
            Reach::Calls => Comms::DEFAULT_STREAMS,
        };
        self.comm_streams.unwrap_or(default)
    }
}

fn at_least_1(what: &str) -> Error {
    format!("{what}: expected at least 1, found 0").into()
}
