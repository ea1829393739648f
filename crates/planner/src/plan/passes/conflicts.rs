//! Passes that cannot both hold, refused when the plan is made.

use crate::error::{PlanError, Result};
use crate::plan::passes::distributed::Distributed;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::rule::Optimizer;
use crate::plan::settings::{GradientAccumulation, LocalSgd, ZeroStage};
use crate::plan::value::Plan;

pub(crate) fn check_conflicts(plan: &Plan) -> Result<()> {
    let conflict = |first: &str, second: &str, why| {
        Err(PlanError::Conflict { first: first.to_owned(), second: second.to_owned(), why })
    };
    let local = plan.averaging().is_some();
    let zero = format!("zero stage {}", plan.zero.number());
    if plan.topology.world > 1 && plan.tensors.are_borrowed() {
        let why = "do not go together, since ranks reduce gradients where the state keeps them";
        return conflict("borrowed tensors", "more than one rank", why);
    }
    if plan.accumulation().is_some() && plan.tensors.are_borrowed() {
        let why = "do not go together, since micro-steps are added where the state keeps them";
        return conflict("borrowed tensors", GradientAccumulation::NAME, why);
    }
    if plan.zero != ZeroStage::None && local {
        return conflict(&zero, LocalSgd::NAME, "both decide how gradients are reduced");
    }
    let average = |rule: &Optimizer| rule.name() == "schedule-free";
    if plan.schedule.is_some() && plan.rules.iter().any(average) {
        let why = "do not go together, since its average takes the place of a schedule";
        return conflict("schedule-free", "a learning-rate schedule", why);
    }
    let distributed = plan.storages.iter().any(|spec| spec.distributed);
    if distributed && local && plan.gradients.rule().is_some() {
        let why = "leave no gradients of which ranks could form one norm";
        let all_gradients = format!("{} with clipping or loss scaling", LocalSgd::NAME);
        return conflict(Distributed::NAME, &all_gradients, why);
    }
    if distributed && local && plan.has_normed()? {
        let why = "do not go together, since a trust ratio takes the norm of all slices at \
                   every step";
        let normed = format!("{} with lars or lamb", Distributed::NAME);
        return conflict(&normed, LocalSgd::NAME, why);
    }
    Ok(())
}
