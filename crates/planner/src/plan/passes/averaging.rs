//! Pass `local_sgd`: ranks update on their own and average their parameters now and then.

use crate::error::Result;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::settings::LocalSgd;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;

impl Rewrite for LocalSgd {
    const NAME: &'static str = "local_sgd";
    const ACTS_ON: ActsOn = ActsOn::Ranks;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.averaging().is_some())?;
        plan.stages.retain(|stage| !matches!(stage, Stage::Reduce(_)));
        plan.stages.push(Stage::Average(*self));
        let reason = format!("ranks average {self}; gradients never");
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}
