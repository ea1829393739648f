//! Updates, and the argument tables that devices keep for them.

use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_launch::{
    Backend, DeviceBackend, GroupValues, Launch, LaunchReport, ResidentTable, TensorSums,
};
use fusestep_tensor::Role;

use crate::error::Result;
use crate::plan::batches::{of_read, of_update};
use crate::plan::group::ParameterGroups;
use crate::plan::settings::TableKind;
use crate::plan::stage::Optimize;
use crate::plan::value::Plan;
use crate::run::executor::{DerivedFrom, Executor};
use crate::run::memory::device;
use crate::run::memory::state::{Schedule, State};
use crate::run::stages::launches;

/// Makes the batches anew if other tensors than before are without gradient or have missed steps.
pub(crate) fn refresh(plan: &Plan, state: &mut State) -> Result<()> {
    if !state.schedule.stale {
        return Ok(());
    }
    let groups = ParameterGroups::new(&state.params, |param| state.steps_behind[param]);
    let mut batches = Vec::with_capacity(plan.stages.len());
    for stage in plan.optimize_stages() {
        batches.push(of_update(plan, stage, |param| !state.without_gradient[param], &groups)?);
    }
    for storage in &mut state.storages {
        let step_scalar_bytes = storage.kernel.argument_layout().step_scalar_bytes;
        storage.step_scalars.resize(step_scalar_bytes * groups.groups.len(), 0);
    }
    let mut norm = Vec::new();
    if let (Some(memory), Some(stage)) = (&mut state.norm, plan.norm_stage()) {
        for read in &stage.reads {
            norm.push(of_read(plan, read, |param| !state.without_gradient[param])?);
        }
        memory.placed = false;
    }
    let without_gradient = &state.without_gradient;
    state.exchange.refresh(plan, |param| !without_gradient[param], &groups)?;
    state.schedule = Schedule { groups, batches, norm, stale: false };
    Ok(())
}

/// Makes batches and tables ready for a step; whether the backend derives the step scalars itself.
pub(crate) fn prepare(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<bool> {
    if state.schedule.stale {
        state.settle(backend)?;
        state.tables.generation = 0;
    }
    refresh(plan, state)?;
    if state.tables.kind != TableKind::Resident {
        return Ok(false);
    }
    if state.tables.generation == 0 {
        build_tables(plan, state, backend)?;
    }
    publish_lr(state, backend)?;
    // Those of several ranks are built with the first launch of each stage, and not for all.
    let mut all = state.tables.updates.iter().zip(&state.schedule.batches);
    let has_all = all.all(|(table, batches)| table.is_some() || batches.is_empty());
    Ok(plan.topology.world == 1 && has_all)
}

pub(crate) fn publish_lr(state: &mut State, backend: &dyn Backend) -> Result<()> {
    let unsettled = state.tables.pending > 0 && state.rate_may_change();
    if unsettled {
        // The rate follows from how many steps were applied.
        state.settle(backend)?;
    }
    let rates = || (0..state.rules.len()).map(|rule| state.rate(rule).to_bits());
    if !rates().eq(state.tables.rates.iter().copied()) {
        state.tables.rates = rates().collect();
        let tables = state.tables.updates.iter_mut().zip(&state.updated);
        for (table, &storage) in tables {
            let rule = state.storages[storage].spec.rule;
            if let Some(table) = table {
                let lr = f64::from_bits(state.tables.rates[rule]);
                device::of_tables(backend)?.set_table_lr(table.as_mut(), lr)?;
            }
        }
        if let Some(trust) = &mut state.exchange.trust_on_device {
            let (rates, storages) = (&state.tables.rates, &state.storages);
            trust.set_lr(backend, |stage| {
                f64::from_bits(rates[storages[stage.storage].spec.rule])
            })?;
        }
    }
    Ok(())
}

fn build_tables(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    // Numbers of no meaning but to be different, so that a graph is not taken for one of
    // another state.
    static GENERATIONS: AtomicU64 = AtomicU64::new(1);
    let device = backend.device().filter(|_| plan.topology.world == 1);
    state.tables.updates.clear();
    state.tables.reads.clear();
    for (update, stage) in plan.optimize_stages().enumerate() {
        let table = match device {
            Some(device) => place_update(plan, state, stage, update, device)?,
            None => None,
        };
        state.tables.updates.push(table);
    }
    if let Some(device) = device {
        build_reads(plan, state, device)?;
    }
    let rates = (0..state.rules.len()).map(|rule| state.rate(rule).to_bits());
    state.tables.rates = rates.collect();
    state.tables.generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// The table of a stage that updates, whose gradients are where the launch reads them.
pub(crate) fn place_update(
    plan: &Plan,
    state: &mut State,
    stage: &Optimize,
    update: usize,
    device: &dyn DeviceBackend,
) -> Result<Option<Box<dyn ResidentTable>>> {
    let rule = state.storages[stage.storage].spec.rule;
    let values: Vec<GroupValues> = launches::group_values(state, rule).collect();
    Ok(match launches::of_stage(plan, state, stage, update) {
        // Sums that the host has go with arguments.
        Some(Launch { tensor_sums: Some(TensorSums::Host(_)), .. }) | None => None,
        Some(launch) => Some(device.place_table(&launch, &values)?),
    })
}

fn build_reads(plan: &Plan, state: &mut State, device: &dyn DeviceBackend) -> Result<()> {
    let Some(norm) = &mut state.norm else {
        return Ok(());
    };
    norm.place(plan, &state.schedule.norm, device)?;
    let mut first_partial = 0;
    for (index, batches) in state.schedule.norm.iter().enumerate() {
        let storage = &state.storages[index];
        let list = storage.spec.list(Role::Grad).filter(|_| !batches.is_empty());
        let table = match list.map(|_| norm.reduce(index, storage, batches, first_partial)) {
            Some(reduce) => Some(device.place_reduction(&reduce)?),
            None => None,
        };
        state.tables.reads.push(table);
        first_partial += batches.iter().map(|b| u64::from(b.chunks)).sum::<u64>();
    }
    Ok(())
}

/// Builds the table of a stage of several ranks, whose gradients are where the launch reads
/// them, unless there is one.
pub(crate) fn build_table(
    plan: &Plan,
    state: &mut State,
    stage: &Optimize,
    update: usize,
    backend: &dyn Backend,
) -> Result<()> {
    let is_missing = matches!(state.tables.updates.get(update), Some(None));
    let device = backend.device().filter(|_| is_missing && plan.topology.world > 1);
    if let Some(device) = device {
        let table = place_update(plan, state, stage, update, device)?;
        state.tables.updates[update] = table;
    }
    Ok(())
}

/// Runs a stage that updates, from its table if it has one.
pub(crate) fn run_update(
    plan: &Plan,
    state: &mut State,
    stage: &Optimize,
    update: usize,
    executor: &mut Executor<'_>,
) -> Result<LaunchReport> {
    if let Executor::Backend(backend) = executor {
        build_table(plan, state, stage, update, *backend)?;
    }
    let rule = state.storages[stage.storage].spec.rule;
    let on_device = executor.lends_on_device();
    let values = on_device.then(|| launches::group_values(state, rule).collect::<Vec<_>>());
    let from = values.as_deref().map(|values| DerivedFrom { rule, values });
    // Taken out, so that the launch can borrow the rest of the state.
    let place = state.tables.updates.get_mut(update);
    let table = place.and_then(Option::take);
    let done = match (launches::of_stage(plan, state, stage, update), &table, executor) {
        (None, ..) => Ok(LaunchReport::default()),
        (Some(launch), Some(table), Executor::Backend(backend)) => {
            let device = device::of_tables(*backend);
            device.and_then(|device| device.launch_table(launch, table.as_ref()))
        }
        (Some(launch), _, executor) => executor.launch(launch, from),
    };
    if let Some(place) = state.tables.updates.get_mut(update) {
        *place = table;
    }
    Ok(done?)
}
