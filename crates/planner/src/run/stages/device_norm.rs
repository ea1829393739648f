//! The norm of many ranks' gradients where these lie on devices: nothing waits for the host.
//!
//! ```text
//! leaves of this rank ─► all-reduce ─► chunks ─► tensors, total, control block
//! ```
//! Each rank fills in the leaves of its parts and has zeros for all others, so that adding up over
//! ranks changes no bit of a sum. Counts of what is not finite are integers beside the sums; as
//! f64 they are so small that adding them up is adding the integers.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{Batch, DeviceBackend, FoldLeaves};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::plan::leaves::leaves_in;
use crate::run::comms::bytes::CallKind;
use crate::run::memory::exchange::DeviceNorm;
use crate::run::run::Run;
use crate::run::stages::norm::leaf_squares;
use crate::run::stages::{gather, reduce};

/// Enqueues stage `norm` of several ranks on devices; returns whether the stage runs there.
pub(crate) fn decide(run: &mut Run<'_, '_>) -> Result<bool> {
    let Some(device) = run.comms.device_of(run.backend) else {
        return Ok(false);
    };
    let Some(mut own) = run.state.exchange.norm_on_device.take() else {
        return Ok(false);
    };
    let done = fill_sums(run, device, &mut own);
    if let (Ok(()), Some(norm)) = (&done, &mut run.state.norm) {
        norm.conclude(run.backend, Some((own.partials.as_ref(), own.tensors.as_ref())))?;
    }
    run.state.exchange.norm_on_device = Some(own);
    done.map(|()| true)
}

fn fill_sums(
    run: &mut Run<'_, '_>,
    device: &dyn DeviceBackend,
    own: &mut DeviceNorm,
) -> Result<()> {
    device.zero(own.leaves.as_mut())?;
    let reads = run.plan.norm_stage().map_or(&[][..], |norm| &norm.reads);
    for (index, read) in reads.iter().enumerate() {
        reduce::with_gradients(run.plan, run.state, read.bucket, |state| {
            let batches = &state.schedule.norm[index];
            let members = &run.plan.storages[read.storage].members;
            let leaves: Vec<_> = leaves_in(batches, members, &state.exchange.leaves).collect();
            for (batches, place) in in_runs(batches, &leaves) {
                let Some(squares) = leaf_squares(run.plan, state, index, read, &batches) else {
                    return Ok(());
                };
                device.leaf_squares_into(squares, own.leaves.as_mut(), place as u64)?;
            }
            Ok(())
        })?;
    }
    let kind = CallKind::even(Operation::AllReduce(ReduceOp::Sum), DType::F64);
    let all = 0..own.leaves.len_bytes();
    gather::on_device(device, run.comms, &mut own.leaves, all, kind)?;
    Ok(device.fold_leaves(FoldLeaves {
        leaves: own.leaves.as_ref(),
        index: None,
        places: own.places.as_ref(),
        partials: own.partials.as_mut(),
    })?)
}

/// Batches whose leaves lie one behind the other, each with the place of its first leaf: all
/// records of a read, unless parameters between them are without gradient.
fn in_runs(batches: &[Batch], leaves: &[std::ops::Range<usize>]) -> Vec<(Vec<Batch>, usize)> {
    let records = batches.iter().flat_map(|batch| &batch.records);
    let mut runs: Vec<(Vec<Batch>, usize)> = Vec::new();
    let mut end = None;
    for (record, place) in records.zip(leaves) {
        if end != Some(place.start) {
            runs.push((vec![Batch::default()], place.start));
        }
        end = Some(place.end);
        if let Some(batch) = runs.last_mut().and_then(|(batches, _)| batches.last_mut()) {
            batch.records.push(*record);
        }
    }
    runs
}
