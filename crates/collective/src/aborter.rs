//! Aborters, which break a group off from outside of its calls.

use std::fmt;
use std::sync::Arc;

use crate::CollectiveError;

/// Breaks a group off from any thread; clones do the same. Breaking off twice, or a group that is
/// gone, does nothing.
#[derive(Clone)]
pub struct Aborter {
    rank: usize,
    close: Arc<dyn Fn(CollectiveError) + Send + Sync>,
    failure: Arc<dyn Fn() -> Option<CollectiveError> + Send + Sync>,
}

impl Aborter {
    /// An aborter of `rank` that calls `close`.
    pub fn new(rank: usize, close: impl Fn(CollectiveError) + Send + Sync + 'static) -> Self {
        Self { rank, close: Arc::new(close), failure: Arc::new(|| None) }
    }

    /// An aborter of `rank` that ends a group by `close`. While the group lives, `failure` tells
    /// what has closed it.
    pub fn of<G: Send + Sync + 'static>(
        rank: usize,
        group: &Arc<G>,
        close: impl Fn(&G, CollectiveError) + Send + Sync + 'static,
        failure: impl Fn(&G) -> Option<CollectiveError> + Send + Sync + 'static,
    ) -> Self {
        let (group, seen) = (Arc::downgrade(group), Arc::downgrade(group));
        let close = move |error| {
            if let Some(group) = group.upgrade() {
                close(&group, error);
            }
        };
        Self::new(rank, close).seeing(move || failure(&*seen.upgrade()?))
    }

    /// An aborter that also tells by `failure` what has closed the group.
    pub fn seeing(
        self,
        failure: impl Fn() -> Option<CollectiveError> + Send + Sync + 'static,
    ) -> Self {
        Self { failure: Arc::new(failure), ..self }
    }

    /// Ends all waits of the group: its calls return [`CollectiveError::Aborted`] on every rank.
    pub fn abort(&self, reason: &str) {
        self.close(CollectiveError::Aborted { rank: self.rank, reason: reason.to_owned() });
    }

    /// Ends all waits of the group: its calls return `error` on every rank.
    pub fn close(&self, error: CollectiveError) {
        (self.close)(error);
    }

    /// The error that has closed the group, as [`Communicator::failure`] says it, from any thread.
    /// `None` for a group that is gone, and on an engine that cannot tell.
    ///
    /// [`Communicator::failure`]: crate::Communicator::failure
    pub fn failure(&self) -> Option<CollectiveError> {
        (self.failure)()
    }

    /// The rank whose aborter this is.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl fmt::Debug for Aborter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aborter").field("rank", &self.rank).finish_non_exhaustive()
    }
}
