//! Pass `accumulate`: the gradients of several backward passes in one update.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{ActsOn, Pass, refuse_twice};
use crate::stage::Accumulate;
use crate::{Plan, Result, Stage, Verdict};

/// What becomes of the gradients of all micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulated {
    /// Their mean; weighted, if weights were given.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// When ranks add their gradients to each other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReducedWhen {
    /// Once per update: the fewest bytes between ranks; every rank keeps sums of all gradients.
    #[default]
    PerWindow,
    /// In every micro-step: from ZeRO stage 2 on a rank keeps sums of its shard only.
    ///
    /// Sums are the same at every stage, but not those of [`ReducedWhen::PerWindow`]: ranks come
    /// first, micro-steps after.
    PerMicroStep,
}

/// Adds the gradients of `every` micro-steps, in f32 for 16-bit gradients, and updates once.
///
/// The first micro-step writes, the others add, the last one also divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GradientAccumulation {
    /// Micro-steps of an update.
    pub every: NonZeroU32,
    /// What becomes of their gradients.
    pub accumulated: Accumulated,
    /// When gradients are reduced across ranks.
    pub reduced: ReducedWhen,
}

impl GradientAccumulation {
    /// The mean of this many micro-steps.
    pub fn every(every: NonZeroU32) -> Self {
        Self { every, accumulated: Accumulated::Mean, reduced: ReducedWhen::PerWindow }
    }

    /// Takes the sum in place of the mean.
    pub fn sum(mut self) -> Self {
        self.accumulated = Accumulated::Sum;
        self
    }

    /// Says when gradients are reduced across ranks.
    pub fn reduced(mut self, reduced: ReducedWhen) -> Self {
        self.reduced = reduced;
        self
    }
}

/// As ranks compare it: `4 micro-steps, their mean, reduced once per update`.
impl fmt::Display for GradientAccumulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accumulated = match self.accumulated {
            Accumulated::Mean => "mean",
            Accumulated::Sum => "sum",
        };
        let reduced = match self.reduced {
            ReducedWhen::PerWindow => "once per update",
            ReducedWhen::PerMicroStep => "in each",
        };
        write!(f, "{} micro-steps, their {accumulated}, reduced {reduced}", self.every)
    }
}

impl Pass for GradientAccumulation {
    const NAME: &'static str = "accumulate";
    const ACTS_ON: ActsOn = ActsOn::Gradients;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.accumulation().is_some())?;
        plan.stages.insert(0, Stage::Accumulate(Accumulate { rule: *self }));
        let reason = format!("one update of {self}");
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}
