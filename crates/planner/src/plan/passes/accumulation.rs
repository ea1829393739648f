//! Pass `accumulate`: the gradients of several backward passes in one update.

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::GradientAccumulation;
use crate::plan::stage::{Accumulate, Stage};
use crate::plan::value::Plan;

impl Rewrite for GradientAccumulation {
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
