//! The trait all engines implement.

use std::fmt;
use std::sync::Arc;

use crate::{Call, CallContext, CollectiveError, FlightRecorder};

/// One rank's place in a group of ranks.
///
/// All ranks of a group make the same calls in the same order. Every wait ends: after an error, which every rank gets, the group
/// is closed and each further call returns that error. Ranks are numbered from 0.
pub trait Communicator: Send {
    /// This rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(3, &Options::default(), |mut comm| {
    /// let mut first = [comm.rank() as i32];
    /// comm.broadcast(&mut first, 0).unwrap();
    /// assert_eq!(first, [0]);
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn rank(&self) -> usize;

    /// The number of ranks.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(3, &Options::default(), |mut comm| {
    /// let mut ones = [1i64];
    /// comm.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
    /// assert_eq!(ones, [comm.world_size() as i64]);
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn world_size(&self) -> usize;

    /// Makes one call and returns when this rank's part is done. [`Collectives`](crate::Collectives) has a typed form of each.
    ///
    /// # Errors
    /// [`CollectiveError`]; the same on all ranks. The contents of result buffers are undefined then, except after a mismatch
    /// and for calls that were refused, which write nothing.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(2, &Options::default(), |mut comm| {
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
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError>;

    /// Makes a group of those ranks that pass the same colour; `None` takes part in no group. All ranks call it.
    ///
    /// The new groups are independent of this one and of each other, save that breaking this one off breaks them off too.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(4, &Options::default(), |mut comm| {
    /// let rank = comm.rank() as u32;
    /// let halves = Membership { colour: rank / 2, key: 0 };
    /// let mut half = comm.split(Some(halves)).unwrap().expect("every rank has a colour");
    /// assert_eq!((half.rank(), half.world_size()), (comm.rank() % 2, 2));
    /// let mut sum = [i64::from(rank)];
    /// half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    /// assert_eq!(sum, [[1], [5]][comm.rank() / 2]);
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError>;

    /// Says what the following calls are for.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(2, &Options::default(), |mut comm| {
    /// comm.set_context(CallContext { plan_hash: 0xfeed, bucket: Some(comm.rank() as u32) });
    /// let error = comm.barrier().unwrap_err();
    /// assert!(error.to_string().starts_with("call 1, bucket: expected `0` as on rank 0, found `1` on rank 1"));
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn set_context(&mut self, context: CallContext);

    /// Something that breaks the group off, from any thread.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(2, &Options::default(), |mut comm| {
    /// if comm.rank() == 1 {
    ///     let aborter = comm.aborter();
    ///     std::thread::spawn(move || aborter.abort("out of time")).join().unwrap();
    /// }
    /// let error = comm.barrier().unwrap_err();
    /// assert_eq!(error.to_string(), "aborted by rank 1: out of time");
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn aborter(&self) -> Aborter;

    /// The last calls of this rank.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(2, &Options::default(), |mut comm| {
    /// comm.barrier().unwrap();
    /// let last = comm.recorder().calls().last().unwrap();
    /// assert_eq!((last.operation, last.sequence), ("barrier", 1));
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn recorder(&self) -> &FlightRecorder;

    /// What has closed the group, as far as this rank can tell without a call. `None` is no promise that all is well.
    ///
    /// ```
    /// # use fusestep_collective::*;
    /// # let ranks = run_ranks(1, &Options::default(), |mut comm| {
    /// assert_eq!(comm.failure(), None);
    /// comm.aborter().abort("enough");
    /// assert!(matches!(comm.failure(), Some(CollectiveError::Aborted { .. })));
    /// # }).unwrap();
    /// # ranks.into_iter().for_each(|rank| rank.unwrap());
    /// ```
    fn failure(&self) -> Option<CollectiveError> {
        None
    }
}

/// Which subgroup a rank joins, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Ranks with the same colour come together.
    pub colour: u32,
    /// Ranks are ordered by this, then by their rank in the group that is split.
    pub key: u32,
}

/// Breaks a group off from any thread; clones do the same. Breaking off twice, or a group that is gone, does nothing.
#[derive(Clone)]
pub struct Aborter {
    rank: usize,
    close: Arc<dyn Fn(CollectiveError) + Send + Sync>,
}

impl Aborter {
    /// An aborter of `rank` that calls `close`.
    pub fn new(rank: usize, close: impl Fn(CollectiveError) + Send + Sync + 'static) -> Self {
        Self {
            rank,
            close: Arc::new(close),
        }
    }

    /// Ends all waits of the group: its calls return [`CollectiveError::Aborted`] on every rank.
    pub fn abort(&self, reason: &str) {
        self.close(CollectiveError::Aborted {
            rank: self.rank,
            reason: reason.to_owned(),
        });
    }

    /// The same with an error of one's own.
    pub fn close(&self, error: CollectiveError) {
        (self.close)(error);
    }

    /// The rank whose aborter this is.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl fmt::Debug for Aborter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aborter")
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

impl<C: Communicator + ?Sized> Communicator for Box<C> {
    fn rank(&self) -> usize {
        (**self).rank()
    }
    fn world_size(&self) -> usize {
        (**self).world_size()
    }
    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        (**self).execute(call)
    }
    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        (**self).split(membership)
    }
    fn set_context(&mut self, context: CallContext) {
        (**self).set_context(context);
    }
    fn aborter(&self) -> Aborter {
        (**self).aborter()
    }
    fn recorder(&self) -> &FlightRecorder {
        (**self).recorder()
    }
    fn failure(&self) -> Option<CollectiveError> {
        (**self).failure()
    }
}
