//! The calls of one rank's step, counted, and the communication streams that carry some of them.

use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};

use fusestep_collective::{
    CallContext, CollectiveError, CommStream, Communicator, Operation, RankMemory, ReduceOp,
    ReduceUpdate, Solo, communication_streams,
};
use fusestep_launch::{Backend, BackendError, Buffer, DeviceBackend};
use fusestep_tensor::DType;

use crate::plan::calls::bytes_sent;
use crate::run::comms::bytes::{Bytes, CallKind, Elsewhere, foreign, take_shortest};
use crate::run::comms::segment_calls::SegmentCalls;
use crate::run::comms::shard_groups::ShardGroups;
use crate::run::memory::device;
use crate::run::memory::device_params::DeviceParams;
use crate::run::memory::segment_state::SegmentState;

/// The calls of a rank's step: one communicator, and communication streams for calls that run
/// beside the backward pass.
///
/// Without streams a bucket is reduced when the step is run. With [`Comms::reducing_when_full`],
/// from ZeRO stage 2 on, it is reduced as soon as its last gradient is given. With streams it is
/// reduced at that moment too, on each stream in turn.
pub struct Comms<'a> {
    comm: Caller<'a>,
    groups: Option<ShardGroups>,
    streams: Vec<CommStream>,
    /// Whether segments are reduced as soon as they are full without streams, too.
    when_full: bool,
    /// Stream of calls that bring parameters; made for the first of these calls, on devices at
    /// once.
    ahead: Option<CommStream>,
    /// Memory of a device for parameters that are gathered there.
    spare: Vec<Box<dyn Buffer>>,
    calls: u64,
    bytes: u64,
}

impl std::fmt::Debug for Comms<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comms")
            .field("rank", &self.comm.rank())
            .field("streams", &self.streams.len())
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

/// The communicator of a rank: borrowed, or its own.
enum Caller<'a> {
    Borrowed(&'a mut dyn Communicator),
    Own(Box<dyn Communicator + 'a>),
}

impl<'a> Deref for Caller<'a> {
    type Target = dyn Communicator + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Borrowed(comm) => *comm,
            Self::Own(comm) => comm.as_ref(),
        }
    }
}

impl DerefMut for Caller<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Borrowed(comm) => *comm,
            Self::Own(comm) => comm.as_mut(),
        }
    }
}

impl<'a> Comms<'a> {
    /// The calls of a process that trains alone.
    pub fn alone() -> Self {
        Self::by(Caller::Own(Box::new(Solo::new())))
    }

    /// Streams for buckets where ranks do not see each other's memory: one reduces while gradients
    /// fill the next bucket.
    pub const DEFAULT_STREAMS: usize = 2;

    /// Makes all calls by `comm`, one after the other.
    pub fn direct(comm: &'a mut dyn Communicator) -> Self {
        Self::by(Caller::Borrowed(comm))
    }

    fn by(comm: Caller<'a>) -> Self {
        Self {
            comm,
            groups: None,
            streams: Vec::new(),
            when_full: false,
            ahead: None,
            spare: Vec::new(),
            calls: 0,
            bytes: 0,
        }
    }

    /// Calls of one rank, made by `comm`, with `count` communication streams that reduce buckets in
    /// turn.
    ///
    /// Each stream has a group and a thread of its own. All ranks call this with the same `count`.
    /// A world of one rank gets no streams.
    ///
    /// # Errors
    /// As [`communication_streams`].
    pub fn with_streams(
        comm: &'a mut dyn Communicator,
        count: usize,
    ) -> Result<Self, CollectiveError> {
        let (streams, ahead) = streams_of(comm, count)?;
        Ok(Self { streams, ahead, ..Self::direct(comm) })
    }

    /// Calls of one rank, with `stream_count` streams, for plans whose shard groups have `group`
    /// consecutive ranks ([`crate::Shard::group`]).
    ///
    /// All ranks call this. Streams carry the calls within a group. Calls across groups follow when
    /// the step is run.
    ///
    /// # Errors
    /// As [`communication_streams`]; [`CollectiveError::Refused`] if the world is no multiple of
    /// `group`.
    pub fn in_groups(
        comm: &'a mut dyn Communicator,
        group: NonZeroUsize,
        stream_count: usize,
    ) -> Result<Self, CollectiveError> {
        if group.get() == comm.world_size() {
            return Self::with_streams(comm, stream_count);
        }
        let mut groups = ShardGroups::split(comm, group.get())?;
        let (streams, ahead) = streams_of(groups.within.as_mut(), stream_count)?;
        Ok(Self { streams, ahead, groups: Some(groups), ..Self::direct(comm) })
    }

    /// Has segments reduced as soon as their last gradient is given where no stream does so, from
    /// ZeRO stage 2 on: [`Run::push_grad`] and [`Run::give_view`] wait for the other ranks then,
    /// and a rank has the memory of one segment in place of all.
    ///
    /// From the first gradient of a micro-step until [`Run::step`] ranks make no other calls
    /// ([`Run::calls_while_given`]).
    ///
    /// [`Run::calls_while_given`]: crate::Run::calls_while_given
    /// [`Run::push_grad`]: crate::Run::push_grad
    /// [`Run::give_view`]: crate::Run::give_view
    /// [`Run::step`]: crate::Run::step
    pub fn reducing_when_full(mut self) -> Self {
        self.when_full = true;
        self
    }

    /// Whether the call that gives a segment's last gradient reduces the segment.
    pub(crate) fn reduces_when_full(&self) -> bool {
        self.when_full && !self.has_streams() && self.groups.is_none()
    }

    /// Keeps the memory of parameters that are no longer read, for those that are gathered next.
    pub fn use_again(&mut self, params: DeviceParams) {
        self.spare.extend(params.buffers);
    }

    /// Memory of the backend's device for so many bytes, or more.
    pub(crate) fn spare(
        &mut self,
        backend: &dyn Backend,
        len_bytes: usize,
    ) -> Result<Box<dyn Buffer>, BackendError> {
        let Some(mut memory) = take_shortest(&mut self.spare, len_bytes) else {
            return backend.allocate(len_bytes);
        };
        // Whoever has read it last is through before it is written.
        device::take_back(backend, memory.as_mut())?;
        Ok(memory)
    }

    /// Keeps memory of a device that nobody reads any more, for [`Comms::spare`].
    pub(crate) fn keep(&mut self, memory: impl IntoIterator<Item = Box<dyn Buffer>>) {
        self.spare.extend(memory);
    }

    /// Calls made so far.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Bytes that this rank had to send for its calls, by ring algorithms. A reduce-scatter or an
    /// all-gather among `n` ranks sends `(n − 1) / n` of a buffer, an all-reduce twice as much.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes
    }

    /// The communicator, for the caller's own calls.
    pub fn communicator(&mut self) -> &mut dyn Communicator {
        &mut *self.comm
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.comm.world_size()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn group_size(&self) -> usize {
        let groups = self.groups.as_ref();
        groups.map_or(self.comm.world_size(), |groups| groups.within.world_size())
    }

    /// Whether calls run beside the caller's own work: there are streams, and ranks to call.
    pub fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// The stream of parameters, asked for ahead or brought by the step; `None` without streams.
    ///
    /// Another than those of buckets, because a rank starts these when its gradients are given, and
    /// some give theirs late or not at all: on one stream both kinds of calls would come in
    /// orders that ranks do not share.
    pub(crate) fn stream_ahead(&mut self) -> Result<Option<&CommStream>, CollectiveError> {
        if self.has_streams() && self.ahead.is_none() {
            self.ahead = communication_streams(self.within_group(), 1)?.pop();
        }
        Ok(self.ahead.as_ref())
    }

    /// The communicator of the ranks that share shards.
    pub(crate) fn within_group(&mut self) -> &mut dyn Communicator {
        match &mut self.groups {
            Some(groups) => groups.within.as_mut(),
            None => &mut *self.comm,
        }
    }

    /// Says to the calls that follow which plan they belong to, by its hash: ranks compare it in
    /// each of them.
    pub fn set_plan(&mut self, plan_hash: u64) {
        let context = CallContext { plan_hash, bucket: None };
        self.comm.set_context(context);
        if let Some(groups) = &mut self.groups {
            groups.set_context(context);
        }
    }

    /// Makes one call in place among the ranks that share shards.
    pub(crate) fn in_group<'b>(
        &mut self,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
        bytes: impl Into<Bytes<'b>>,
    ) -> Result<(), CollectiveError> {
        let bytes = bytes.into();
        self.count_in_group(operation, bytes.len());
        bytes.call(self.within_group(), operation, dtype, counts)
    }

    /// The mean over groups; does nothing without them.
    pub(crate) fn across_groups(
        &mut self,
        dtype: DType,
        bytes: Bytes<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(groups) = &mut self.groups else {
            return Ok(());
        };
        let operation = Operation::AllReduce(ReduceOp::Average);
        let (len_bytes, ranks) = (bytes.len(), groups.across.world_size());
        bytes.call(groups.across.as_mut(), operation, dtype, None)?;
        self.count(operation, len_bytes, ranks);
        Ok(())
    }

    pub(crate) fn in_place<'b>(
        &mut self,
        operation: Operation,
        dtype: DType,
        counts: Option<&[usize]>,
        bytes: impl Into<Bytes<'b>>,
    ) -> Result<(), CollectiveError> {
        let bytes = bytes.into();
        self.count(operation, bytes.len(), self.comm.world_size());
        bytes.call(&mut *self.comm, operation, dtype, counts)
    }

    /// Whether calls use this buffer in place.
    pub(crate) fn takes(&self, backend: &dyn Backend, buffer: &dyn Buffer) -> bool {
        buffer.host().is_some() || self.device_of(backend).is_some()
    }

    /// The backend's device, if calls are made in its memory.
    pub(crate) fn device_of<'b>(&self, backend: &'b dyn Backend) -> Option<&'b dyn DeviceBackend> {
        backend.device().filter(|device| self.comm.device() == Some(device.ordinal()))
    }

    /// The error that the communicator has failed with.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        self.comm.failure().map_or(Ok(()), Err)
    }

    /// Reduces a bucket of all ranks and updates it in one pass.
    pub(crate) fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        context: CallContext,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        // Every gradient but the rank's own comes here, and its replicas go to everybody.
        let replicas = call.replicas.iter().map(|replica| replica.bytes.len());
        let len_bytes = call.grads.len() + replicas.sum::<usize>();
        self.count(Operation::ReduceUpdate, len_bytes, self.comm.world_size());
        self.comm.set_context(context);
        let done = self.comm.reduce_update(call, work);
        self.comm.set_context(CallContext { bucket: None, ..context });
        done
    }

    /// Makes the calls of a segment at once and puts this rank's parts into its shard.
    pub(crate) fn reduce_into(
        &mut self,
        calls: &SegmentCalls,
        memory: &[u8],
        shard: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.count_calls(calls);
        calls.make_into(self.within_group(), memory, shard)
    }

    /// Starts the calls of a segment: on its stream, or at once.
    pub(crate) fn reduce(
        &mut self,
        index: usize,
        calls: SegmentCalls,
        mut memory: Box<dyn Buffer>,
    ) -> Result<SegmentState, CollectiveError> {
        self.count_calls(&calls);
        if self.streams.is_empty() || (calls.of_world && self.groups.is_some()) {
            if calls.of_world {
                calls.make(&mut *self.comm, &mut memory)?;
            } else {
                calls.make(self.within_group(), &mut memory)?;
            }
            return Ok(SegmentState::Here(Some(memory)));
        }
        let stream = &self.streams[index % self.streams.len()];
        let work = move |comm: &mut dyn Communicator, memory: &mut Box<dyn Buffer>| {
            calls.make(comm, memory)
        };
        Ok(SegmentState::InFlight(stream.start("bucket", memory, work)))
    }

    /// Makes a call among the ranks that share shards in place on a part of a buffer that was
    /// handed over: on a stream if there is one, which watches what the device does, so that nobody
    /// here has to wait for it.
    pub(crate) fn on_device(
        &mut self,
        buffer: &mut Box<dyn Buffer>,
        range: Range<usize>,
        kind: CallKind,
    ) -> Result<(), CollectiveError> {
        let CallKind { operation, dtype, counts } = kind;
        self.count_in_group(operation, range.len());
        let rank = self.comm.rank();
        let make = move |comm: &mut dyn Communicator, memory: &mut Box<dyn Buffer>| {
            let bytes = Bytes::of(memory.as_mut(), range).ok_or_else(|| foreign(rank))?;
            bytes.call(comm, operation, dtype, counts.as_deref())
        };
        let Some(stream) = self.stream_ahead()? else {
            return make(self.within_group(), buffer);
        };
        let memory = std::mem::replace(buffer, Box::new(Elsewhere));
        *buffer = stream.start(operation.name(), memory, make).wait()?;
        Ok(())
    }

    /// Waits for what was enqueued on devices by calls that no stream has made.
    pub(crate) fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        if let Some(groups) = &mut self.groups {
            groups.finish_on_device()?;
        }
        self.comm.finish_on_device()
    }

    fn count_calls(&mut self, calls: &SegmentCalls) {
        for call in &calls.buckets {
            if calls.of_world {
                self.count_in_world(call.operation(), call.bytes.len());
            } else {
                self.count_in_group(call.operation(), call.bytes.len());
            }
        }
    }

    /// Counts a call among the ranks that share shards.
    pub(crate) fn count_in_group(&mut self, operation: Operation, len_bytes: usize) {
        self.count(operation, len_bytes, self.group_size());
    }

    /// Counts a call among all ranks.
    pub(crate) fn count_in_world(&mut self, operation: Operation, len_bytes: usize) {
        self.count(operation, len_bytes, self.comm.world_size());
    }

    fn count(&mut self, operation: Operation, len_bytes: usize, ranks: usize) {
        self.calls += 1;
        self.bytes += bytes_sent(operation, len_bytes as u64, ranks as u64);
    }
}

/// Streams for buckets, none of a single rank, and the stream of parameters where calls are made on
/// devices. Founding that one takes memory there, for which a driver may wait until calls that are
/// under way have ended.
fn streams_of(
    comm: &mut dyn Communicator,
    count: usize,
) -> Result<(Vec<CommStream>, Option<CommStream>), CollectiveError> {
    if comm.world_size() == 1 {
        return Ok((Vec::new(), None));
    }
    let streams = communication_streams(comm, count)?;
    let ahead = if streams.is_empty() || comm.device().is_none() {
        None
    } else {
        communication_streams(comm, 1)?.pop()
    };
    Ok((streams, ahead))
}

#[cfg(test)]
mod tests {
    use fusestep_collective::{Options, run_ranks};

    use super::*;

    #[test]
    fn a_buffer_that_is_not_handed_over_is_said_of_the_rank_of_the_world() {
        for streams in [0, 1] {
            let told = run_ranks(4, &Options::default(), |mut comm| {
                let group = NonZeroUsize::new(2).unwrap();
                let mut comms = Comms::in_groups(&mut comm, group, streams).unwrap();
                let mut buffer: Box<dyn Buffer> = Box::new(Elsewhere);
                let kind = CallKind::even(Operation::Barrier, DType::F32);
                comms.on_device(&mut buffer, 0..4, kind).unwrap_err()
            });
            for (rank, told) in told.unwrap().into_iter().enumerate() {
                let told = told.unwrap().to_string();
                // The first error of a world may end the others' calls on streams.
                let own = told.starts_with(&format!("bucket on rank {rank}: "));
                assert!(own || (streams > 0 && rank > 0), "{rank}: {told}");
            }
        }
    }
}
