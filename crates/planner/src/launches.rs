//! The launches of a plan's stages, on the memory of a state.

use fusestep_launch::{Backend, Batch, Launch, LaunchReport, TensorSums};

use crate::device_trust::DeviceTrust;
use crate::exchange::Exchange;
use crate::norm::NormState;
use crate::run::Executor;
use crate::storage::StorageState;
use crate::update_norms::UpdateSlots;
use crate::{Optimize, Plan, PlanError, State, table};

/// The launch of a stage that updates; `None` if it has no batches.
pub(crate) fn of_stage<'a>(
    plan: &'a Plan,
    state: &'a mut State,
    stage: &Optimize,
    update: usize,
) -> Option<Launch<'a>> {
    // Taken apart so that the launch can borrow the batches beside the storage.
    let State {
        schedule,
        storages,
        norm,
        exchange,
        ..
    } = state;
    let decided = (norm.as_ref(), &*exchange);
    launch(plan, stage, (&schedule.batches[update], storages), decided)
}

/// The launch of a stage with batches of the caller's.
pub(crate) fn with_batches<'a>(
    plan: &'a Plan,
    state: &'a mut State,
    stage: &Optimize,
    batches: &'a [Batch],
) -> Option<Launch<'a>> {
    let decided = (state.norm.as_ref(), &state.exchange);
    launch(plan, stage, (batches, &mut state.storages), decided)
}

/// Builds the table of a stage of several ranks, whose gradients are where the launch reads
/// them, unless there is one.
pub(crate) fn build_table(
    plan: &Plan,
    state: &mut State,
    (stage, update): (&Optimize, usize),
    backend: &dyn Backend,
) -> Result<(), PlanError> {
    let is_missing = matches!(state.tables.updates.get(update), Some(None));
    if is_missing && plan.topology.world > 1 && backend.device().is_some() {
        let table = table::place_update(plan, state, (stage, update), backend)?;
        state.tables.updates[update] = table;
    }
    Ok(())
}

/// Runs a stage that updates, from its table if it has one.
pub(crate) fn run(
    plan: &Plan,
    state: &mut State,
    (stage, update): (&Optimize, usize),
    executor: &mut Executor<'_>,
) -> Result<LaunchReport, PlanError> {
    if let Executor::Backend(backend) = executor {
        build_table(plan, state, (stage, update), *backend)?;
    }
    // Taken out, so that the launch can borrow the rest of the state.
    let place = state.tables.updates.get_mut(update);
    let table = place.and_then(Option::take);
    let done = match (of_stage(plan, state, stage, update), &table, executor) {
        (None, ..) => Ok(LaunchReport::default()),
        (Some(launch), Some(table), Executor::Backend(backend)) => {
            backend.launch_table(launch, table.as_ref())
        }
        (Some(launch), _, executor) => executor.launch(launch),
    };
    if let Some(place) = state.tables.updates.get_mut(update) {
        *place = table;
    }
    Ok(done?)
}

fn launch<'a>(
    plan: &'a Plan,
    stage: &Optimize,
    (batches, storages): (&'a [Batch], &'a mut [StorageState]),
    (norm, exchange): (Option<&'a NormState>, &'a Exchange),
) -> Option<Launch<'a>> {
    if batches.is_empty() {
        return None;
    }
    let control = norm.map(|norm| norm.control.as_ref());
    // Those of several ranks are formed together, for tensors that this rank may have in parts.
    let alone = norm.filter(|_| plan.topology.world == 1);
    let segment = stage.bucket.map_or(0, |bucket| plan.segment_start(bucket));
    let storage = &mut storages[stage.storage];
    storage.set_firsts(&stage.elements, segment);
    Some(Launch {
        kernel: storage.kernel.as_ref(),
        batches,
        offsets: storage.spec.layout.offsets(),
        members: &storage.spec.members,
        lists: &mut storage.lists,
        firsts: &storage.firsts,
        scalars: &storage.scalars,
        control,
        grad_sums: alone.map(|norm| norm.sums.as_ref()),
        tensor_sums: storage.tensor_sums.as_deref().map(|sums| {
            let on_device = exchange.trust_on_device.as_ref();
            let on_device = on_device.and_then(DeviceTrust::sums);
            on_device.unwrap_or(TensorSums::Host(sums))
        }),
        update_sums: storage.update_slots.as_mut().map(UpdateSlots::lend),
        sets: &storage.sets,
        limits: plan.limits_of(storage.kernel.as_ref()),
    })
}
