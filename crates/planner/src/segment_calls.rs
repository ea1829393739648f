//! The calls that reduce a segment of gradients, bucket by bucket, and the segment on its way.

use std::ops::Range;

use fusestep_collective::{
    CallContext, CollectiveError, Communicator, Operation, Pending, ReduceOp,
};
use fusestep_launch::Buffer;
use fusestep_tensor::DType;

use crate::bytes::{Bytes, foreign};

/// A segment on its way.
#[derive(Debug)]
pub(crate) enum Reducing {
    Done(Box<dyn Buffer>),
    Pending(Pending<Box<dyn Buffer>>),
}

/// The calls that reduce the buckets of a segment, one after the other.
#[derive(Debug)]
pub(crate) struct SegmentCalls {
    pub(crate) dtype: DType,
    pub(crate) plan_hash: u64,
    pub(crate) buckets: Vec<BucketCall>,
}

/// How a bucket is reduced.
#[derive(Debug)]
pub(crate) struct BucketCall {
    pub(crate) bucket: usize,
    /// Its bytes in the segment.
    pub(crate) bytes: Range<usize>,
    /// Elements of each rank's part, if each gets only its own.
    pub(crate) counts: Option<Vec<usize>>,
}

impl BucketCall {
    pub(crate) fn operation(&self) -> Operation {
        if self.counts.is_some() {
            Operation::ReduceScatter(ReduceOp::Average)
        } else {
            Operation::AllReduce(ReduceOp::Average)
        }
    }
}

impl SegmentCalls {
    /// Makes the calls on the segment's memory.
    pub(crate) fn make(
        &self,
        comm: &mut dyn Communicator,
        memory: &mut Box<dyn Buffer>,
    ) -> Result<(), CollectiveError> {
        for call in &self.buckets {
            comm.set_context(CallContext {
                plan_hash: self.plan_hash,
                bucket: Some(call.bucket as u32),
            });
            let bytes = Bytes::of(memory.as_mut(), call.bytes.clone());
            let bytes = bytes.ok_or_else(|| foreign(comm.rank()))?;
            bytes.call(comm, (call.operation(), self.dtype), call.counts.as_deref())?;
        }
        comm.set_context(CallContext {
            plan_hash: self.plan_hash,
            bucket: None,
        });
        Ok(())
    }
}
