//! Tasks: the words and the deadline of a call, in all of its rounds.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fusestep_collective::{Begun, CollectiveError, Fingerprint};

use crate::card::{Card, Cards};
use crate::group::Group;

/// One call, as all of its rounds need it.
pub(crate) struct Task {
    pub(crate) card: Card,
    /// The call as errors name it when ranks are late: a receive, which is compared as a send.
    pub(crate) named: Fingerprint,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

impl Task {
    /// The task of a call, which the group's other ranks are told of.
    pub(crate) fn new(begun: &Begun<'_>, group: &Group) -> Self {
        group.member(group.rank).calls.store(begun.calls(), Ordering::Relaxed);
        Self {
            card: Card::new(begun.print, group.begun_ns + begun.arrived_ns),
            named: begun.named(),
            deadline: begun.deadline,
            timeout: begun.timeout,
        }
    }

    /// Requires that all of `ranks`, the parties of a round, do the same. Writes down the rank that
    /// came last.
    pub(crate) fn agree(
        &self,
        begun: &mut Begun<'_>,
        cards: Cards<'_>,
        ranks: &[usize],
    ) -> Result<(), CollectiveError> {
        let compared = cards.compare(&self.card.print);
        compared.map_err(|error| error.with_ranks(ranks))?;
        let arrived = |party: usize| cards.arrived_ns(party);
        if let Some(last) = (0..cards.parties()).max_by_key(|&party| arrived(party)) {
            let waited_ns = arrived(last).saturating_sub(self.card.arrived_ns);
            begun.waited(ranks[last], waited_ns);
        }
        Ok(())
    }
}
