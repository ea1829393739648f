//! The launches of a plan's stages, on the memory of a state, and the scalars that they read.

use fusestep_launch::{Batch, GroupValues, Launch, TensorSums};

use crate::plan::stage::Optimize;
use crate::plan::value::Plan;
use crate::run::memory::device_sums::DeviceTrust;
use crate::run::memory::exchange::Exchange;
use crate::run::memory::norm::NormState;
use crate::run::memory::state::State;
use crate::run::memory::storage::StorageState;
use crate::run::memory::update_sums::UpdateRows;

/// The launch of a stage that updates; `None` if it has no batches.
pub(crate) fn of_stage<'a>(
    plan: &'a Plan,
    state: &'a mut State,
    stage: &Optimize,
    update: usize,
) -> Option<Launch<'a>> {
    // Taken apart so that the launch can borrow the batches beside the storage.
    let State { schedule, storages, norm, exchange, .. } = state;
    launch(plan, stage, &schedule.batches[update], storages, norm.as_ref(), exchange)
}

/// The launch of a stage with batches of the caller's.
pub(crate) fn with_batches<'a>(
    plan: &'a Plan,
    state: &'a mut State,
    stage: &Optimize,
    batches: &'a [Batch],
) -> Option<Launch<'a>> {
    launch(plan, stage, batches, &mut state.storages, state.norm.as_ref(), &state.exchange)
}

fn launch<'a>(
    plan: &'a Plan,
    stage: &Optimize,
    batches: &'a [Batch],
    storages: &'a mut [StorageState],
    norm: Option<&'a NormState>,
    exchange: &'a Exchange,
) -> Option<Launch<'a>> {
    if batches.is_empty() {
        return None;
    }
    let control = norm.map(|norm| norm.control.as_ref());
    // Those of several ranks are formed together, for tensors that this rank may have in parts.
    let alone = norm.filter(|_| plan.topology.world == 1);
    let segment = plan.segment_start(stage.bucket);
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
        update_sums: storage.update_rows.as_mut().map(UpdateRows::lend),
        step_scalars: &storage.step_scalars,
        limits: plan.limits_of(storage.kernel.as_ref()),
    })
}

/// Derives every group's step scalars to come, in f64 and rounded once.
pub(crate) fn write_step_scalars(state: &mut State) {
    for storage in 0..state.storages.len() {
        let step_scalar_bytes = state.storages[storage].kernel.argument_layout().step_scalar_bytes;
        for group in 0..state.schedule.groups.groups.len() {
            let rule = state.storages[storage].spec.rule;
            let values = values_of(state, rule, group);
            let storage = &mut state.storages[storage];
            let step_scalars =
                &mut storage.step_scalars[group * step_scalar_bytes..][..step_scalar_bytes];
            storage.kernel.write_step_scalars(values, step_scalars);
        }
    }
}

/// The hyper-parameters of a group of one rule at the step to come.
fn values_of(state: &State, rule: usize, group: usize) -> GroupValues {
    let group = &state.schedule.groups.groups[group];
    GroupValues {
        lr: state.rate(rule),
        lr_scale: group.lr_scale,
        weight_decay: group.weight_decay,
        trust: group.trust,
        step: state.step + 1 - group.steps_behind,
    }
}

/// Values of all groups.
pub(crate) fn group_values(state: &State, rule: usize) -> impl Iterator<Item = GroupValues> {
    let groups = 0..state.schedule.groups.groups.len();
    groups.map(move |group| values_of(state, rule, group))
}
