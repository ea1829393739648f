//! The trait all engines implement.

use fusestep_coalesce::HostMemory;

use crate::{
    Aborter, Call, CallContext, CollectiveError, DeviceCall, FlightRecorder, Membership, Operation,
    RankMemory, ReduceUpdate,
};

/// One rank's place in a group of ranks.
///
/// All ranks of a group make the same calls in the same order. Every wait ends: after an error,
/// which every rank gets, the group is closed and each further call returns that error. Ranks are
/// numbered from 0.
pub trait Communicator: Send {
    /// This rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(3, &Options::default(), |mut comm| {
    /// let mut first = [comm.rank() as i32];
    /// comm.broadcast(&mut first, 0).unwrap();
    /// assert_eq!(first, [0]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn rank(&self) -> usize;

    /// The number of ranks.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(3, &Options::default(), |mut comm| {
    /// let mut ones = [1i64];
    /// comm.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
    /// assert_eq!(ones, [comm.world_size() as i64]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn world_size(&self) -> usize;

    /// Makes one call and returns when this rank's part is done.
    /// [`Collectives`](crate::Collectives) has a typed form of each.
    ///
    /// # Errors
    /// [`CollectiveError`]; the same on all ranks. The contents of result buffers are undefined
    /// then, except after a mismatch and for calls that were refused, which write nothing.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// // An all-gather in place: every rank's block lies where it belongs in the whole.
    /// let mut whole = [0u8; 2];
    /// whole[comm.rank()] = 5 + comm.rank() as u8;
    /// comm.execute(Call {
    ///     operation: Operation::AllGather,
    ///     dtype: fusestep_tensor::DType::U8,
    ///     counts: None,
    ///     buffers: Buffers::InPlace(&mut whole),
    /// }).unwrap();
    /// assert_eq!(whole, [5, 6]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError>;

    /// Makes a group of those ranks that pass the same colour; `None` takes part in no group. All
    /// ranks call it.
    ///
    /// The new groups are independent of this one and of each other, save that breaking this one
    /// off breaks them off too, and that on GPUs an error of one ends all groups of its GPU.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(4, &Options::default(), |mut comm| {
    /// let rank = comm.rank() as u32;
    /// let halves = Membership { colour: rank / 2, key: 0 };
    /// let mut half = comm.split(Some(halves)).unwrap().expect("every rank has a colour");
    /// assert_eq!((half.rank(), half.world_size()), (comm.rank() % 2, 2));
    /// let mut sum = [i64::from(rank)];
    /// half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    /// assert_eq!(sum, [[1], [5]][comm.rank() / 2]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError>;

    /// Sets the purpose of the following calls.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// comm.set_context(CallContext { plan_hash: 0xfeed, bucket: Some(comm.rank() as u32) });
    /// let error = comm.barrier().unwrap_err();
    /// let expected = "call 1, bucket: expected `0` as on rank 0, found `1` on rank 1";
    /// assert!(error.to_string().starts_with(expected));
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn set_context(&mut self, context: CallContext);

    /// The aborter that breaks the group off, from any thread.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// if comm.rank() == 1 {
    ///     let aborter = comm.aborter();
    ///     std::thread::spawn(move || aborter.abort("out of time")).join().unwrap();
    /// }
    /// let error = comm.barrier().unwrap_err();
    /// assert_eq!(error.to_string(), "aborted by rank 1: out of time");
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn aborter(&self) -> Aborter;

    /// The last calls of this rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// comm.barrier().unwrap();
    /// let last = comm.recorder().calls().last().unwrap();
    /// assert_eq!((last.operation, last.sequence), ("barrier", 1));
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn recorder(&self) -> &FlightRecorder;

    /// Zeroed memory for buffers that calls move. An engine whose ranks can see each other's memory
    /// gives memory that all ranks see. Calls take any other memory too, and copy it then. Ranks
    /// need not ask for equal lengths.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] if there is not enough memory.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let mut arena = comm.allocate(8).unwrap();
    /// comm.all_reduce(arena.elements_mut::<f32>(), ReduceOp::Sum).unwrap();
    /// assert_eq!(arena.bytes(), [0; 8]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        zeroed(self.rank(), len_bytes)
    }

    /// Whether [`reduce_update`](Self::reduce_update) works here, on memory that
    /// [`allocate`](Self::allocate) gave.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |comm| {
    /// assert!(comm.shares_memory());
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn shares_memory(&self) -> bool {
        false
    }

    /// Brings the gradients and replicas of all ranks together. Once all ranks have come, does
    /// `work` on this rank's block of them; returns when all have finished. No rank writes
    /// gradients meanwhile, so nothing is copied.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`CollectiveError::Refused`] on an engine whose ranks do not
    /// see each other's memory.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # use fusestep_tensor::DType;
    /// # run_ranks(2, &Options::default(), |mut comm| {
    /// let grads = [comm.rank() as u8 + 1; 4];
    /// let mut params = [9u8; 4];
    /// let call = ReduceUpdate {
    ///     grad_dtype: DType::U8,
    ///     grads: &grads,
    ///     replicas: Replicas::from_iter([Replica {
    ///         dtype: DType::U8,
    ///         elements: 1,
    ///         bytes: &mut params,
    ///     }]),
    ///     counts: &[3, 1],
    /// };
    /// comm.reduce_update(call, &mut |mut memory| {
    ///     let sum: u8 = memory.grads.iter().map(|grads| grads[0]).sum();
    ///     for params in &mut memory.replicas[0] {
    ///         params.fill(sum + memory.rank as u8);
    ///     }
    /// }).unwrap();
    /// assert_eq!(params, [3, 3, 3, 4]);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let (_, _) = (call, work);
        Err(not_shared(self.rank()))
    }

    /// The number of the device whose memory [`execute_on_device`](Self::execute_on_device) takes;
    /// `None` on an engine that works in host memory.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(2, &Options::default(), |comm| {
    /// assert_eq!(comm.device(), None);
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn device(&self) -> Option<u32> {
        None
    }

    /// [`execute`](Self::execute) on memory of this rank's device: no byte goes through the host.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`CollectiveError::Refused`] for memory of another device,
    /// and on an engine that works in host memory.
    ///
    /// A call on memory in the order of events ([`DeviceOrder::Events`]) returns when it is
    /// enqueued; [`finish_on_device`](Self::finish_on_device) says how it went.
    ///
    /// [`DeviceOrder::Events`]: fusestep_tensor::DeviceOrder::Events
    fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        Err(not_on_device(self.rank(), &call))
    }

    /// Waits until all calls that [`execute_on_device`](Self::execute_on_device) has enqueued are
    /// done. An engine whose calls return only when they are done has nothing to wait for. A rank
    /// that makes calls on its device must call this too, on a thread that may wait. Until then
    /// nobody sees that data does not come.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// The connection between ranks for a few bytes of the host, which needs no device; `None` on
    /// an engine that works in host memory.
    fn control(&mut self) -> Option<&mut dyn Communicator> {
        None
    }

    /// The error that has closed the group, as far as this rank can tell without a call. `None` is
    /// no promise that all is well.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # run_ranks(1, &Options::default(), |mut comm| {
    /// assert_eq!(comm.failure(), None);
    /// comm.aborter().abort("enough");
    /// assert!(matches!(comm.failure(), Some(CollectiveError::Aborted { .. })));
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn failure(&self) -> Option<CollectiveError> {
        None
    }
}

/// Zeroed memory that `rank` alone sees.
pub(crate) fn zeroed(rank: usize, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
    let made = HostMemory::zeroed(len_bytes);
    made.map_err(|error| CollectiveError::refused(rank, "allocate", error))
}

/// The refusal of a reduce-update by an engine whose ranks send their memory.
pub(crate) fn not_shared(rank: usize) -> CollectiveError {
    let reason = "expected ranks that see each other's memory, found an engine that sends it; \
                  reduce first and update then";
    CollectiveError::refused(rank, Operation::ReduceUpdate.name(), reason)
}

/// The refusal of a device's memory by an engine that works in host memory.
pub(crate) fn not_on_device(rank: usize, call: &DeviceCall<'_>) -> CollectiveError {
    let reason = format!(
        "expected host memory, which this engine works in, found some of GPU {}; copy it to the \
         host first, or use NCCL",
        call.buffers.both()[0].ordinal()
    );
    CollectiveError::refused(rank, call.operation.name(), reason)
}

impl<C: Communicator + ?Sized> Communicator for Box<C> {
    crate::forward_calls! {
        this => (**this);
        rank, world_size, execute, split, set_context, aborter, recorder, allocate, shares_memory,
        reduce_update, device, execute_on_device, finish_on_device, control, failure,
    }
}
