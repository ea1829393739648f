//! The calls of one rank's step, counted.

use std::sync::Arc;

use fusestep_collective::{
    Buffers, Call, CallContext, CollectiveError, Communicator, Operation, Pending, ReduceOp, Ring,
    rings,
};
use fusestep_tensor::DType;

use super::words::Words;

/// What a rank's step makes its calls with: one communicator, and rings for calls that run beside the backward pass.
///
/// Without rings a bucket is reduced when the step is run; with them as soon as its last gradient is given, in turn on each ring.
pub struct Comms<'a> {
    comm: &'a mut dyn Communicator,
    rings: Vec<Ring>,
    calls: u64,
    bytes: u64,
}

impl std::fmt::Debug for Comms<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comms")
            .field("rank", &self.comm.rank())
            .field("rings", &self.rings.len())
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

impl<'a> Comms<'a> {
    /// All calls by `comm`, one after the other.
    pub fn direct(comm: &'a mut dyn Communicator) -> Self {
        Self {
            comm,
            rings: Vec::new(),
            calls: 0,
            bytes: 0,
        }
    }

    /// Buckets in turn on `count` rings, each a group and a thread of its own; all ranks ask for the same number.
    ///
    /// # Errors
    /// As [`rings`].
    pub fn with_rings(
        comm: &'a mut dyn Communicator,
        count: usize,
    ) -> Result<Self, CollectiveError> {
        let rings = match comm.world_size() {
            1 => Vec::new(),
            _ => rings(comm, count)?,
        };
        Ok(Self {
            rings,
            ..Self::direct(comm)
        })
    }

    /// Calls made so far.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Bytes that this rank had to send for them, by ring algorithms: `(n − 1) / n` of a buffer for a reduce-scatter or an
    /// all-gather among `n` ranks, twice that for an all-reduce.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes
    }

    /// The communicator, for calls of one's own.
    pub fn communicator(&mut self) -> &mut dyn Communicator {
        self.comm
    }

    pub(crate) fn world(&self) -> usize {
        self.comm.world_size()
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    pub(crate) fn set_plan(&mut self, plan_hash: u64) {
        self.comm.set_context(CallContext {
            plan_hash,
            bucket: None,
        });
    }

    /// Makes one call in place.
    pub(crate) fn in_place(
        &mut self,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
        bytes: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.count(operation, bytes.len());
        self.comm.execute(Call {
            operation,
            dtype,
            counts,
            buffers: Buffers::InPlace(bytes),
        })
    }

    /// Starts reducing bucket `index`: on its ring, or at once.
    pub(crate) fn reduce(
        &mut self,
        index: usize,
        call: &BucketCall,
        mut words: Words,
    ) -> Result<Reducing, CollectiveError> {
        self.count(call.operation(), words.bytes().len());
        if self.rings.is_empty() {
            call.make(&mut *self.comm, &mut words)?;
            return Ok(Reducing::Done(words));
        }
        let ring = &self.rings[index % self.rings.len()];
        let call = call.clone();
        let pending = ring.start("bucket", words, move |comm, words| call.make(comm, words));
        Ok(Reducing::Pending(pending))
    }

    fn count(&mut self, operation: Operation, len_bytes: usize) {
        let world = self.comm.world_size() as u64;
        let part = len_bytes as u64 * (world - 1) / world;
        self.calls += 1;
        self.bytes += match operation {
            Operation::AllReduce(_) => 2 * part,
            _ => part,
        };
    }
}

/// A bucket on its way.
#[derive(Debug)]
pub(crate) enum Reducing {
    Done(Words),
    Pending(Pending<Words>),
}

/// How a bucket is reduced.
#[derive(Clone, Debug)]
pub(crate) struct BucketCall {
    pub(crate) dtype: DType,
    /// Each rank's part, if each gets only its own.
    pub(crate) counts: Option<Arc<[usize]>>,
    pub(crate) context: CallContext,
}

impl BucketCall {
    fn operation(&self) -> Operation {
        match self.counts {
            Some(_) => Operation::ReduceScatter(ReduceOp::Average),
            None => Operation::AllReduce(ReduceOp::Average),
        }
    }

    fn make(&self, comm: &mut dyn Communicator, words: &mut Words) -> Result<(), CollectiveError> {
        comm.set_context(self.context);
        let done = comm.execute(Call {
            operation: self.operation(),
            dtype: self.dtype,
            counts: self.counts.as_deref(),
            buffers: Buffers::InPlace(words.bytes_mut()),
        });
        comm.set_context(CallContext {
            bucket: None,
            ..self.context
        });
        done
    }
}
