//! The calls of one rank's step, counted.

use std::num::NonZeroUsize;
use std::sync::Arc;

use fusestep_collective::{
    Buffers, Call, CallContext, CollectiveError, Communicator, Membership, Operation, Pending,
    ReduceOp, Ring, rings,
};
use fusestep_tensor::DType;

use super::words::Words;

/// What a rank's step makes its calls with: one communicator, and rings for calls that run beside the backward pass.
///
/// Without rings a bucket is reduced when the step is run; with them as soon as its last gradient is given, in turn on each ring.
pub struct Comms<'a> {
    comm: &'a mut dyn Communicator,
    groups: Option<Groups>,
    rings: Vec<Ring>,
    /// Carries calls that bring parameters ahead of their use; made for the first of them.
    ahead: Option<Ring>,
    calls: u64,
    bytes: u64,
}

/// The ranks that share shards with this one, and those that have the same shard in other groups.
struct Groups {
    within: Box<dyn Communicator>,
    across: Box<dyn Communicator>,
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
    /// Rings for buckets unless there is a reason for another number: one reduces while the next bucket of gradients fills the other.
    pub const DEFAULT_RINGS: usize = 2;

    /// All calls by `comm`, one after the other.
    pub fn direct(comm: &'a mut dyn Communicator) -> Self {
        Self {
            comm,
            groups: None,
            rings: Vec::new(),
            ahead: None,
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

    /// For plans whose shards lie in groups of `group` consecutive ranks ([`crate::Shard::group`]), with `rings` rings; all ranks
    /// call it. Rings carry the calls within a group; those across groups follow when the step is run.
    ///
    /// # Errors
    /// As [`rings`]; [`CollectiveError::Refused`] if the world is no multiple of `group`.
    pub fn in_groups(
        comm: &'a mut dyn Communicator,
        group: NonZeroUsize,
        ring_count: usize,
    ) -> Result<Self, CollectiveError> {
        let (rank, world, group) = (comm.rank(), comm.world_size(), group.get());
        let refused = || CollectiveError::Refused {
            rank,
            operation: "split",
            reason: format!(
                "expected a world that is a multiple of a shard group's {group} ranks, found {world} ranks"
            ),
        };
        if !world.is_multiple_of(group) {
            return Err(refused());
        }
        if group == world {
            return Self::with_rings(comm, ring_count);
        }
        let (colour, key) = ((rank / group) as u32, 0);
        let within = comm.split(Some(Membership { colour, key }))?;
        let colour = (rank % group) as u32;
        let across = comm.split(Some(Membership { colour, key }))?;
        let (mut within, across) = within.zip(across).ok_or_else(refused)?;
        let rings = match group {
            1 => Vec::new(),
            _ => rings(within.as_mut(), ring_count)?,
        };
        Ok(Self {
            rings,
            groups: Some(Groups { within, across }),
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

    /// The number of ranks that share shards.
    pub(crate) fn group_size(&self) -> usize {
        let groups = self.groups.as_ref();
        groups.map_or(self.comm.world_size(), |groups| groups.within.world_size())
    }

    /// This rank among them.
    pub(crate) fn group_rank(&self) -> usize {
        let groups = self.groups.as_ref();
        groups.map_or(self.comm.rank(), |groups| groups.within.rank())
    }

    /// Whether calls run beside the caller's own work: there are rings, and ranks to call.
    pub fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// The ring of parameters that are asked for ahead; `None` without rings.
    ///
    /// Apart from those of buckets, because a rank starts these when its gradients are given, and some give theirs late or not at
    /// all: on one ring both kinds of calls would come in orders that ranks do not share.
    pub(crate) fn ring_ahead(&mut self) -> Result<Option<&Ring>, CollectiveError> {
        if self.has_rings() && self.ahead.is_none() {
            self.ahead = rings(self.within_group(), 1)?.pop();
        }
        Ok(self.ahead.as_ref())
    }

    /// The communicator of the ranks that share shards.
    pub(crate) fn within_group(&mut self) -> &mut dyn Communicator {
        match &mut self.groups {
            Some(groups) => groups.within.as_mut(),
            None => self.comm,
        }
    }

    pub(crate) fn set_plan(&mut self, plan_hash: u64) {
        let context = CallContext {
            plan_hash,
            bucket: None,
        };
        self.comm.set_context(context);
        if let Some(groups) = &mut self.groups {
            groups.within.set_context(context);
            groups.across.set_context(context);
        }
    }

    /// The same among the ranks that share shards.
    pub(crate) fn in_group(
        &mut self,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
        bytes: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.count_in_group(operation, bytes.len());
        self.within_group().execute(Call {
            operation,
            dtype,
            counts,
            buffers: Buffers::InPlace(bytes),
        })
    }

    /// The mean over groups; does nothing without them.
    pub(crate) fn across_groups(
        &mut self,
        dtype: DType,
        bytes: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let Some(groups) = &mut self.groups else {
            return Ok(());
        };
        let operation = Operation::AllReduce(ReduceOp::Average);
        let (len_bytes, ranks) = (bytes.len(), groups.across.world_size());
        groups.across.execute(Call {
            operation,
            dtype,
            counts: None,
            buffers: Buffers::InPlace(bytes),
        })?;
        self.count(operation, len_bytes, ranks);
        Ok(())
    }

    /// Makes one call in place.
    pub(crate) fn in_place(
        &mut self,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
        bytes: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.count(operation, bytes.len(), self.comm.world_size());
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
        self.count_in_group(call.operation(), words.bytes().len());
        if self.rings.is_empty() {
            call.make(self.within_group(), &mut words)?;
            return Ok(Reducing::Done(words));
        }
        let ring = &self.rings[index % self.rings.len()];
        let call = call.clone();
        let pending = ring.start("bucket", words, move |comm, words| call.make(comm, words));
        Ok(Reducing::Pending(pending))
    }

    /// Counts a call among the ranks that share shards.
    pub(crate) fn count_in_group(&mut self, operation: Operation, len_bytes: usize) {
        self.count(operation, len_bytes, self.group_size());
    }

    fn count(&mut self, operation: Operation, len_bytes: usize, ranks: usize) {
        let world = ranks as u64;
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
