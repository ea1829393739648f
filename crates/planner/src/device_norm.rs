//! The norm of many ranks' gradients where these lie on devices: nothing waits for the host.
//!
//! ```text
//! leaves of this rank ─► all-reduce ─► chunks ─► tensors, total, control block
//! ```
//! Each rank fills in the leaves of its parts and has zeros for all others, so that adding up over
//! ranks changes no bit of a sum. Counts of what is not finite are integers beside the sums; as
//! f64 they are so small that adding them up is adding the integers.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{Backend, Batch, Buffer, FoldLeaves, SquareSum};
use fusestep_tensor::DType;

use crate::exchange::{Exchange, leaf_squares};
use crate::leaves::{chunks_of_leaves, leaves_in};
use crate::step::RankStep;
use crate::{Plan, Result, device_trust, gather, reduce};

/// What lies on the device for it.
pub(crate) struct DeviceNorm {
    /// The sum of every leaf of all parameters.
    leaves: Box<dyn Buffer>,
    /// The leaves of every chunk.
    places: Box<dyn Buffer>,
    /// The sum of every chunk.
    partials: Box<dyn Buffer>,
    /// The chunks of every parameter.
    tensors: Box<dyn Buffer>,
}

impl DeviceNorm {
    /// The memory, if the plan may run the stage on the backend's device: made before any call is
    /// under way there, for which a driver may wait.
    pub(crate) fn of(
        plan: &Plan,
        exchange: &Exchange,
        backend: &dyn Backend,
    ) -> Result<Option<Self>> {
        let may = plan.norm_stage().is_some() && device_trust::sums_may_stay_on_devices(plan);
        if backend.device().is_none() || !may {
            return Ok(None);
        }
        let (places, tensors) = chunks_of_leaves(&exchange.leaves);
        Ok(Some(Self {
            leaves: backend.allocate(exchange.count() * size_of::<SquareSum>())?,
            partials: backend.allocate(places.len() * size_of::<SquareSum>())?,
            places: table(backend, bytemuck::cast_slice(&places))?,
            tensors: table(backend, bytemuck::cast_slice(&tensors))?,
        }))
    }
}

/// A table in the backend's memory.
pub(crate) fn table(backend: &dyn Backend, bytes: &[u8]) -> Result<Box<dyn Buffer>> {
    let mut buffer = backend.allocate(bytes.len())?;
    backend.write(buffer.as_mut(), 0, bytes)?;
    Ok(buffer)
}

/// Stage `norm` of several ranks on devices: enqueues all of it. Whether it runs there.
pub(crate) fn decide(step: &mut RankStep<'_, '_>) -> Result<bool> {
    if !step.comms.is_on_device_of(step.backend) {
        return Ok(false);
    }
    let Some(mut own) = step.state.exchange.norm_on_device.take() else {
        return Ok(false);
    };
    let done = fill_sums(step, &mut own);
    if let (Ok(()), Some(norm)) = (&done, &mut step.state.norm) {
        norm.conclude(step.backend, Some((own.partials.as_ref(), own.tensors.as_ref())))?;
    }
    step.state.exchange.norm_on_device = Some(own);
    done.map(|()| true)
}

fn fill_sums(step: &mut RankStep<'_, '_>, own: &mut DeviceNorm) -> Result<()> {
    step.backend.zero(own.leaves.as_mut())?;
    let reads = step.plan.norm_stage().map_or(&[][..], |norm| &norm.reads);
    for (index, read) in reads.iter().enumerate() {
        reduce::with_gradients(step.plan, step.state, read.bucket, |state| {
            let batches = &state.schedule.norm[index];
            let members = &step.plan.storages[read.storage].members;
            let leaves: Vec<_> = leaves_in(batches, members, &state.exchange.leaves).collect();
            for (batches, place) in in_runs(batches, &leaves) {
                let Some(squares) = leaf_squares(step.plan, state, (index, read), &batches) else {
                    return Ok(());
                };
                step.backend.leaf_squares_into(squares, (own.leaves.as_mut(), place as u64))?;
            }
            Ok(())
        })?;
    }
    let call = (Operation::AllReduce(ReduceOp::Sum), DType::F64, None);
    let all = 0..own.leaves.len_bytes();
    gather::on_device(step.backend, step.comms, (&mut own.leaves, all), call)?;
    Ok(step.backend.fold_leaves(FoldLeaves {
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
