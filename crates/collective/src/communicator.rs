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
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Makes one call and returns when this rank's part is done. [`Collectives`](crate::Collectives) has a typed form of each.
    ///
    /// # Errors
    /// [`CollectiveError`]; the same on all ranks. The contents of result buffers are undefined then, except after a mismatch
    /// and for calls that were refused, which write nothing.
    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError>;

    /// Makes a group of those ranks that pass the same colour; `None` takes part in no group. All ranks call it.
    ///
    /// The new groups are independent of this one and of each other, save that breaking this one off breaks them off too.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError>;

    /// Says what the following calls are for.
    fn set_context(&mut self, context: CallContext);

    /// Something that breaks the group off, from any thread.
    fn aborter(&self) -> Aborter;

    /// The last calls of this rank.
    fn recorder(&self) -> &FlightRecorder;

    /// What has closed the group, as far as this rank can tell without a call. `None` is no promise that all is well.
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
