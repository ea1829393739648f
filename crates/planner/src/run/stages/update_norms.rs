//! How far parameters moved: the memory for the sums that updates leave, and their readers.

use fusestep_launch::{Backend, UnitSums, fold_units, tree_sum};

use crate::error::Result;
use crate::plan::leaves::chunks_of;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::comms::sums::{Scope, sum_over};
use crate::run::memory::state::State;
use crate::run::memory::update_sums::{UpdateReader, UpdateRows, sum_of};
use crate::run::report::StepReport;
use crate::run::run::Run;

/// Writes the norm of the step's changes to the step's `report`.
pub(crate) fn report(
    state: &mut State,
    backend: &dyn Backend,
    report: &mut StepReport,
) -> Result<()> {
    if let Some((_, total)) = &state.exchange.update_sums {
        report.update_norm = Some(total.sqrt());
        return Ok(());
    }
    // Taken out, so that the rest of the state can be read.
    let Some(mut reader) = state.update_reader.take() else {
        return Ok(());
    };
    let read = read_sums(state, backend, &mut reader, report.skipped);
    let sum = tree_sum(reader.params(), |param| reader.sum(param));
    report.update_norm = Some(sum.sqrt());
    state.update_reader = Some(reader);
    read
}

/// Reads the sums of each parameter's chunks in the last step's batches; a skipped step has none.
pub(crate) fn read_sums(
    state: &State,
    backend: &dyn Backend,
    reader: &mut UpdateReader,
    skipped: bool,
) -> Result<()> {
    let UpdateReader { chunks, firsts: places, copy } = reader;
    chunks.fill(0.0);
    if skipped {
        return Ok(());
    }
    let mut copied = None;
    for (&storage, batches) in state.updated.iter().zip(&state.schedule.batches) {
        let own = &state.storages[storage];
        let Some(UpdateRows { rows, firsts }) = &own.update_rows else {
            continue;
        };
        let units: &[UnitSums] = match rows.host() {
            Some(bytes) => bytemuck::cast_slice(bytes),
            None => {
                if copied != Some(storage) {
                    let count = rows.len_bytes() / size_of::<UnitSums>();
                    copy.resize(count, UnitSums::default());
                    backend.read(rows.as_ref(), 0, bytemuck::cast_slice_mut(copy))?;
                    copied = Some(storage);
                }
                copy
            }
        };
        for record in batches.iter().flat_map(|batch| &batch.records) {
            let before = chunks_of(record.first_element);
            let count = chunks_of(record.numel);
            let from = firsts[record.tensor as usize] as usize + before;
            let to = places[own.spec.members[record.tensor as usize] as usize] + before;
            let units = units[from..from + count].iter();
            for (chunk, units) in chunks[to..to + count].iter_mut().zip(units) {
                *chunk = fold_units(units);
            }
        }
    }
    Ok(())
}

/// Adds up over ranks how far each parameter moved.
pub(crate) fn share(run: &mut Run<'_, '_>, skipped: bool) -> Result<()> {
    // Taken out, so that the rest of the state can be read.
    let Some(mut own) = run.state.update_reader.take() else {
        return Ok(());
    };
    let read = read_sums(run.state, run.backend, &mut own, skipped);
    let sums = read.and_then(|()| sums_of_ranks(run.plan, run.comms, &own));
    run.state.update_reader = Some(own);
    run.state.exchange.update_sums = Some(sums?);
    Ok(())
}

/// The sum over each parameter, and the total over all ranks.
fn sums_of_ranks(
    plan: &Plan,
    comms: &mut Comms<'_>,
    own: &UpdateReader,
) -> Result<(Vec<f64>, f64)> {
    let distributed = |param: usize| plan.is_distributed(param);
    let mut all = own.clone();
    if plan.zero != crate::ZeroStage::None && plan.reduces() {
        // Slices are of other lengths on other ranks.
        let shared: Vec<usize> = (0..own.params()).filter(|&param| !distributed(param)).collect();
        let chunks = shared.iter().flat_map(|&param| &own.chunks[own.place(param)]);
        let mut told: Vec<f64> = chunks.copied().collect();
        sum_over(comms, &mut told, Scope::ShardGroup)?;
        let mut rest = &told[..];
        for param in shared {
            let place = own.place(param);
            let (summed, behind) = rest.split_at(place.len());
            all.chunks[place].copy_from_slice(summed);
            rest = behind;
        }
    }
    let sum = |param: usize| all.sum(param);
    let sums: Vec<f64> = (0..own.params()).map(sum).collect();
    let total = total_over_slices(plan, comms, &sums, distributed)?;
    Ok((sums, total))
}

/// The sum over all parameters, with each rank's slices counted once: rank 0's slices in their
/// places, other ranks' behind.
fn total_over_slices(
    plan: &Plan,
    comms: &mut Comms<'_>,
    sums: &[f64],
    distributed: impl Fn(usize) -> bool,
) -> Result<f64> {
    let params: Vec<usize> = (0..sums.len()).filter(|&param| distributed(param)).collect();
    let (rank, world) = (plan.topology.rank, plan.topology.world);
    let mut all = vec![0.0; world * params.len()];
    for (at, &param) in params.iter().enumerate() {
        all[rank * params.len() + at] = sums[param];
    }
    if !all.is_empty() {
        sum_over(comms, &mut all, Scope::World)?;
    }
    let mut of_first = sums.to_vec();
    for (at, &param) in params.iter().enumerate() {
        of_first[param] = all[at];
    }
    of_first.extend(all.get(params.len()..).unwrap_or_default());
    Ok(sum_of(&of_first))
}
