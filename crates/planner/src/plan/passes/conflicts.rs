//! Passes that cannot both hold, refused when the plan is made.

use fusestep_tensor::grouped;

use crate::error::{PlanError, Result};
use crate::plan::lanes::Lanes;
use crate::plan::passes::distributed::Distributed;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::rule::Optimizer;
use crate::plan::settings::{GradientAccumulation, LocalSgd, ReduceDType, ZeroStage};
use crate::plan::storage::StorageSpec;
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
    if plan.lanes.is_some() && plan.tensors.are_borrowed() && plan.adds_micro_steps() {
        let why = "do not go together, since lanes are added where the state keeps them";
        return conflict("borrowed tensors", Lanes::NAME, why);
    }
    if let Some(lanes) = plan.lanes {
        let found = u64::from(lanes.count.get()) * u64::from(plan.of_lane());
        if found > Lanes::MOST_MICRO_BATCHES {
            let expected = format!(
                "at most {} in all lanes; ask for fewer lanes or fewer of each",
                grouped(Lanes::MOST_MICRO_BATCHES)
            );
            return Err(PlanError::MicroBatches { expected, found });
        }
    }
    if plan.lanes.is_some() && local {
        let why = "do not go together: parameters averaged now and then follow the number of ranks";
        return conflict(Lanes::NAME, LocalSgd::NAME, why);
    }
    if plan.lanes.is_some() && plan.reduces_each() {
        let why = "do not go together: sums of one micro-step over all ranks follow their number";
        return conflict(Lanes::NAME, "gradients reduced in each micro-step", why);
    }
    check_wire(plan)?;
    if plan.zero != ZeroStage::None && local {
        return conflict(&zero, LocalSgd::NAME, "both decide how gradients are reduced");
    }
    let average = |rule: &Optimizer| rule.name() == "schedule-free";
    if plan.schedule.is_some() && plan.rules.iter().any(average) {
        let why = "do not go together, since its average takes the place of a schedule";
        return conflict("schedule-free", "a learning-rate schedule", why);
    }
    check_codes(plan)?;
    let distributed = plan.storages.iter().any(|spec| spec.distributed);
    if distributed && plan.lanes.is_some() {
        let why = "do not go together: a slice's gradient is of the micro-batches of its rank";
        return conflict(Lanes::NAME, Distributed::NAME, why);
    }
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

/// Refuses what does not go with state in codes.
fn check_codes(plan: &Plan) -> Result<()> {
    if !plan.storages.iter().any(StorageSpec::is_coded) {
        return Ok(());
    }
    if !plan.storages.iter().any(|spec| spec.distributed) {
        return Ok(());
    }
    let why = "do not go together: slices of ranks are not cut between groups of 32 elements; use \
               state_dtype bf16 or f32";
    let second = Distributed::NAME.to_owned();
    Err(PlanError::Conflict { first: "state_dtype int8".to_owned(), second, why })
}

/// Refuses what does not go with gradients that travel in another type than that of their sums.
fn check_wire(plan: &Plan) -> Result<()> {
    let Some(wire) = plan.wire.filter(|_| plan.topology.world > 1) else {
        return Ok(());
    };
    let (second, why) = if plan.lanes.is_some() {
        (Lanes::NAME, "do not go together: what a rank rounds would follow the number of ranks")
    } else if plan.averaging().is_some() {
        let why = "do not go together, since ranks average parameters and send no gradients";
        (LocalSgd::NAME, why)
    } else if plan.shard_group < plan.topology.world {
        ("shard groups", "do not go together, since means of groups would be rounded once more")
    } else {
        return Ok(());
    };
    let first = format!("{} {wire}", ReduceDType::NAME);
    Err(PlanError::Conflict { first, second: second.to_owned(), why })
}
