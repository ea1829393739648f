//! Pass `gradient_merge`: the gradients of several backward passes in one update.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{ActsOn, Pass};
use crate::{Note, Plan, PlanError, Verdict};

/// What is made of the gradients of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Merged {
    /// Their mean; weighted, if weights were given.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// When ranks add their gradients to each other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduced {
    /// Once per window: the fewest bytes between ranks; every rank keeps sums of all gradients.
    #[default]
    PerWindow,
    /// In every micro-step: from ZeRO stage 2 on a rank keeps sums of its shard only.
    ///
    /// Sums are the same at every stage, but not those of [`Reduced::PerWindow`]: ranks come first, micro-steps after.
    PerMicroStep,
}

/// Adds the gradients of `every` micro-steps, in f32 for 16-bit gradients, and updates once.
///
/// The first micro-step writes, the others add, the last one also divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GradientMerge {
    /// Micro-steps of a window.
    pub every: NonZeroU32,
    /// What is made of their gradients.
    pub merged: Merged,
    /// When gradients are reduced across ranks.
    pub reduced: Reduced,
}

impl GradientMerge {
    /// The mean of this many micro-steps.
    pub fn every(every: NonZeroU32) -> Self {
        Self {
            every,
            merged: Merged::Mean,
            reduced: Reduced::PerWindow,
        }
    }

    /// Takes the sum in place of the mean.
    pub fn sum(mut self) -> Self {
        self.merged = Merged::Sum;
        self
    }

    /// Says when gradients are reduced across ranks.
    pub fn reduced(mut self, reduced: Reduced) -> Self {
        self.reduced = reduced;
        self
    }
}

impl Pass for GradientMerge {
    fn name(&self) -> &'static str {
        "gradient_merge"
    }

    fn acts_on(&self) -> ActsOn {
        ActsOn::Ranks
    }

    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError> {
        if plan.ranks.merge.replace(*self).is_some() {
            return Err(PlanError::PassTwice { pass: self.name() });
        }
        let reason = format!(
            "{} micro-steps make one update, of the {} of their gradients, reduced {}",
            self.every,
            match self.merged {
                Merged::Mean => "mean",
                Merged::Sum => "sum",
            },
            match self.reduced {
                Reduced::PerWindow => "once per window",
                Reduced::PerMicroStep => "in every micro-step",
            }
        );
        let note = Note::new(self.name(), Verdict::Applied, reason);
        plan.notes.push(note);
        Ok(())
    }
}
