//! The calls that reduce a segment of gradients, bucket by bucket.

use std::ops::Range;

use fusestep_collective::{
    Buffers, Call, CallContext, CollectiveError, Communicator, Operation, ReduceOp,
};
use fusestep_launch::Buffer;
use fusestep_tensor::DType;

use crate::plan::stage::Reduced;
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;
use crate::run::comms::bytes::{Bytes, foreign, on_host};

/// The calls that reduce the buckets of a segment, one after the other.
#[derive(Debug)]
pub(crate) struct SegmentCalls {
    dtype: DType,
    plan_hash: u64,
    /// The rank within the world, whatever group makes the calls.
    rank: usize,
    pub(crate) buckets: Vec<BucketCall>,
    /// Whether the rank's own part of every bucket lies in one piece in its shard.
    pub(crate) fit_shard: bool,
    /// Whether all ranks make the calls, whatever groups share out shards.
    pub(crate) of_world: bool,
}

/// How a bucket is reduced.
#[derive(Debug)]
pub(crate) struct BucketCall {
    bucket: usize,
    /// Its bytes in the segment.
    pub(crate) bytes: Range<usize>,
    /// Elements of each rank's part, if each gets only its own.
    counts: Option<Vec<usize>>,
    how: ReduceOp,
    /// The bytes of the rank's own part in its shard.
    in_shard: Range<usize>,
}

impl BucketCall {
    pub(crate) fn operation(&self) -> Operation {
        if self.counts.is_some() {
            Operation::ReduceScatter(self.how)
        } else {
            Operation::AllReduce(self.how)
        }
    }
}

impl SegmentCalls {
    /// The calls of segment `index`, of which every rank gets `result`.
    pub(crate) fn of(plan: &Plan, index: usize, result: Reduced, how: ReduceOp) -> Self {
        let segment = &plan.segments[index];
        let spec = &plan.storages[segment.storage];
        let dtype = spec.grad_dtype();
        let width = dtype.len_bytes();
        let mut fit_shard = result == Reduced::Part;
        let buckets = segment.buckets.clone().map(|at| {
            let bucket = &plan.buckets[at];
            let own = in_shard(spec, bucket.part(plan.shard_place().rank), width);
            fit_shard &= own.is_some();
            BucketCall {
                bucket: at,
                bytes: bucket.place(segment.elements.start, width),
                counts: (result == Reduced::Part).then(|| bucket.counts()),
                in_shard: own.unwrap_or_default(),
                how,
            }
        });
        let (plan_hash, rank) = (plan.hash(), plan.topology().rank);
        let buckets: Vec<BucketCall> = buckets.collect();
        Self { dtype, plan_hash, rank, buckets, fit_shard, of_world: plan.lanes.is_some() }
    }

    /// Makes the calls on the segment's memory, whose results stay there.
    pub(crate) fn make(
        &self,
        comm: &mut dyn Communicator,
        memory: &mut Box<dyn Buffer>,
    ) -> Result<(), CollectiveError> {
        self.each(comm, |comm, call| {
            let bytes = Bytes::of(memory.as_mut(), call.bytes.clone());
            let bytes = bytes.ok_or_else(|| foreign(self.rank))?;
            bytes.call(comm, call.operation(), self.dtype, call.counts.as_deref())
        })
    }

    /// Makes the calls on the segment's memory and puts this rank's parts into its shard.
    pub(crate) fn make_into(
        &self,
        comm: &mut dyn Communicator,
        memory: &[u8],
        shard: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.each(comm, |comm, call| {
            let whole = memory.get(call.bytes.clone());
            let own = shard.get_mut(call.in_shard.clone());
            let (Some(send), Some(receive)) = (whole, own) else {
                return Err(foreign(self.rank));
            };
            let made = Call {
                operation: call.operation(),
                dtype: self.dtype,
                counts: call.counts.as_deref(),
                buffers: Buffers::OutOfPlace { send, receive },
            };
            on_host(comm, made, send.len())
        })
    }

    fn each(
        &self,
        comm: &mut dyn Communicator,
        mut make: impl FnMut(&mut dyn Communicator, &BucketCall) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        for call in &self.buckets {
            comm.set_context(CallContext {
                plan_hash: self.plan_hash,
                bucket: Some(call.bucket as u32),
            });
            make(comm, call)?;
        }
        comm.set_context(CallContext { plan_hash: self.plan_hash, bucket: None });
        Ok(())
    }
}

/// Bytes of this rank's shard that hold elements of a storage; `None` if not in one range.
fn in_shard(spec: &StorageSpec, elements: Range<u64>, width: usize) -> Option<Range<usize>> {
    if elements.is_empty() {
        return Some(0..0);
    }
    let numel = (elements.end - elements.start) as usize;
    let part = spec.own_parts(elements).next().filter(|part| part.numel() == numel)?;
    // A shard lies in memory, so its bytes fit a usize.
    let at = part.at as usize;
    Some(at * width..(at + numel) * width)
}
