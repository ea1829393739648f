//! Pass `lanes`: sums of gradients that no number of ranks changes.

use fusestep_tensor::{DType, counted};

use crate::error::{PlanError, Result};
use crate::plan::lanes::Lanes;
use crate::plan::note::Verdict;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

impl Rewrite for Lanes {
    const NAME: &'static str = "lanes";
    const ACTS_ON: ActsOn = ActsOn::Gradients;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.lanes.is_some())?;
        let (lanes, world) = (self.count.get(), plan.topology.world);
        if (lanes as usize) < world {
            return Err(PlanError::Topology {
                expected: format!(
                    "at most {} for {}",
                    counted(lanes.into(), "rank"),
                    counted(lanes.into(), "lane"),
                ),
                found: format!("{world}; ask for as many lanes as ranks, or start fewer ranks"),
            });
        }
        plan.lanes = Some(*self);
        Ok(())
    }
}

/// Says how sums of gradients are formed, once it is known what the other passes ask for.
pub(crate) fn explain(plan: &mut Plan) {
    let Some(lanes) = plan.lanes else {
        return;
    };
    let (of_lane, world) = (plan.of_lane(), plan.topology.world);
    let brought = lanes.contributions(world).iter().map(|own| own.slot + 1).max();
    plan.lanes_given = brought.unwrap_or(1);
    let [given, held] = lanes.most(world, of_lane);
    let mut reason = format!(
        "gradients are added along one tree over {} of {}, the same bits at any number of ranks; a \
         rank keeps at most {} of a gradient at once",
        counted(lanes.count.get().into(), "lane"),
        counted(of_lane.into(), "micro-batch"),
        counted(held as u64, "sum"),
    );
    if world > 1 {
        reason += &format!(" and gives at most {given} to the others");
    }
    let is_widened = |storage: &StorageSpec| {
        let grad = storage.grad_dtype();
        grad == DType::F32 && storage.param_dtype() != grad
    };
    if plan.storages.iter().any(is_widened) {
        reason += "; sums of 16-bit gradients stay f32 up to the update";
    }
    plan.note(Lanes::NAME, Verdict::Applied, reason);
}
