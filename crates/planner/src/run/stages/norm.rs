//! The stage that reads all gradients before anything is updated.

use fusestep_collective::Operation;
use fusestep_launch::{
    Backend, Batch, ControlBlock, ControlRule, LaunchReport, LeafSquares, SquareSum, TensorPartials,
};
use fusestep_tensor::{DType, Role};

use crate::error::Result;
use crate::plan::leaves::{chunk_squares, leaves_in};
use crate::plan::stage::GradientRead;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::comms::sums::{Scope, sum_over};
use crate::run::executor::Executor;
use crate::run::memory::device;
use crate::run::memory::exchange::Exchange;
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::stages::{parts, reduce};

/// Runs the stage: one read of the gradients, then the control block.
pub(crate) fn run(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
) -> Result<LaunchReport> {
    let given = state.norm.as_mut().and_then(|norm| norm.given.take());
    let mut report = match given {
        None => read(plan, state, executor)?,
        // They were read for the sums that are given.
        Some(_) => LaunchReport::default(),
    };
    let Some(norm) = &mut state.norm else {
        return Ok(report);
    };
    report.launches += match parts::share_squares(norm, executor)? {
        None => norm.conclude(executor.backend(), None)?,
        Some(told) => parts::conclude(norm, executor.backend(), &told)?,
    }
    .launches;
    // The sums of each gradient are this plan's; whether the step counts follows from all.
    if let Some(all) = given {
        norm.conclude_over(executor.backend(), &all)?;
    }
    Ok(report)
}

/// Reads the gradients: one sum for each chunk.
pub(crate) fn read(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
) -> Result<LaunchReport> {
    let mut report = LaunchReport::default();
    let Some(norm) = &mut state.norm else {
        return Ok(report);
    };
    norm.place(plan, &state.schedule.norm, executor.backend())?;
    executor.scale(norm.control.as_mut())?;
    let mut first_partial = 0;
    for (index, batches) in state.schedule.norm.iter().enumerate() {
        let storage = &state.storages[index];
        if batches.is_empty() {
            continue;
        }
        let reduce = norm.reduce(index, storage, batches, first_partial);
        let done = match state.tables.reads.get(index).and_then(Option::as_ref) {
            Some(table) => {
                device::of_tables(executor.backend())?.reduce_table(reduce, table.as_ref())?
            }
            None => executor.reduce(reduce)?,
        };
        report.launches += done.launches;
        first_partial += batches.iter().map(|b| u64::from(b.chunks)).sum::<u64>();
    }
    Ok(report)
}

/// Runs stage `norm` of several ranks on the host, over the gradients of all. Returns whether the
/// step is skipped.
pub(crate) fn decide(run: &mut Run<'_, '_>) -> Result<bool> {
    let mut squares = own_squares(run.plan, run.state, run.backend)?;
    let mut elsewhere = 0;
    let slices = if run.plan.reduces() {
        share(&run.state.exchange, run.comms, &mut squares, 2)?
    } else {
        // Every rank has gradients of its own; only that some are not finite is everybody's
        // business.
        let own: f64 = squares.iter().skip(1).step_by(2).sum();
        let mut all = [own];
        sum_over(run.comms, &mut all, Scope::World)?;
        elsewhere = (all[0] - own) as u64;
        None
    };
    let Some(norm) = &mut run.state.norm else {
        return Ok(false);
    };
    let mut partials = Vec::new();
    let mut tensors = Vec::with_capacity(run.plan.params.len());
    for param in 0..run.plan.params.len() {
        let first = partials.len() as u64;
        let leaves = run.state.exchange.of_param(param, 2, &squares, slices.as_deref());
        partials.extend(chunk_squares(&leaves));
        tensors.push(TensorPartials { first, count: partials.len() as u64 - first });
    }
    if elsewhere > 0 {
        tensors.push(TensorPartials { first: partials.len() as u64, count: 1 });
        partials.push(SquareSum { sum: 0.0, non_finite: elsewhere });
    }
    let mut sums = vec![SquareSum::default(); tensors.len()];
    let mut block = ControlBlock::read(run.backend, norm.control.as_ref())?;
    norm.rule.run_host(&partials, &tensors, &mut sums, &mut block);
    block.write(run.backend, norm.control.as_mut())?;
    let own = &sums[..run.plan.params.len()];
    run.backend.write(norm.sums.as_mut(), 0, bytemuck::cast_slice(own))?;
    Ok(block.found != 0)
}

/// Adds up the shared leaves over ranks, each of which has filled in its own, with `width` values
/// for each leaf. Gathers the leaves of all ranks' slices, if there are any.
pub(crate) fn share(
    exchange: &Exchange,
    comms: &mut Comms<'_>,
    told: &mut [f64],
    width: usize,
) -> Result<Option<Vec<f64>>> {
    let (shared, own) = told.split_at_mut(exchange.shared * width);
    sum_over(comms, shared, Scope::ShardGroup)?;
    // Also of a rank whose own slices are empty.
    if exchange.slices.count() == 0 {
        return Ok(None);
    }
    let counts: Vec<usize> = exchange.slices.counts.iter().map(|count| count * width).collect();
    let mut values = vec![0.0; counts.iter().sum()];
    let at: usize = counts[..comms.rank()].iter().sum();
    values[at..at + own.len()].copy_from_slice(own);
    let bytes = bytemuck::cast_slice_mut(&mut values);
    comms.in_place(Operation::AllGather, DType::F64, Some(&counts), bytes)?;
    Ok(Some(values))
}

/// The sums of squares of the leaves that this rank reads, each with the number of its elements
/// that are not finite; 0 for all others.
fn own_squares(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<Vec<f64>> {
    let mut squares = vec![0.0; 2 * state.exchange.count()];
    let reads = plan.norm_stage().map_or(&[][..], |norm| &norm.reads);
    for (index, read) in reads.iter().enumerate() {
        let own = reduce::with_gradients(plan, state, read.bucket, |state| {
            let batches = &state.schedule.norm[index];
            let Some(leaves) = leaf_squares(plan, state, index, read, batches) else {
                return Ok(Vec::new());
            };
            let mut sums = vec![SquareSum::default(); leaves.places().count()];
            backend.leaf_squares(leaves, &mut sums)?;
            Ok(sums)
        })?;
        let members = &plan.storages[read.storage].members;
        let places = leaves_in(&state.schedule.norm[index], members, &state.exchange.leaves);
        for (place, sum) in places.flatten().zip(own) {
            squares[2 * place] = sum.sum;
            squares[2 * place + 1] = sum.non_finite as f64;
        }
    }
    Ok(squares)
}

/// Squares that the read of stage `norm` with this index sums in these batches; `None` where the
/// caller lends gradients.
pub(crate) fn leaf_squares<'a>(
    plan: &Plan,
    state: &'a State,
    index: usize,
    read: &GradientRead,
    batches: &'a [Batch],
) -> Option<LeafSquares<'a>> {
    let storage = &state.storages[read.storage];
    let list = storage.spec.list(Role::Grad)?;
    let segment = plan.segment_start(read.bucket);
    Some(LeafSquares {
        kernel: state.exchange.readers[index].as_ref(),
        batches,
        offsets: storage.spec.layout.offsets(),
        list: &storage.lists[list],
        first: storage.spec.first_of(list, &read.elements, segment),
    })
}
