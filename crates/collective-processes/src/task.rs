//! What a call says and how long it waits, in all of its rounds.

use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, Fingerprint, FlightRecorder};

use crate::card::{Card, Cards};
use crate::group::Group;
use crate::round::Coming;

/// One call as all its rounds need it.
pub(crate) struct Task {
    pub(crate) card: Card,
    /// As it is named when ranks are late: a receive is compared as a send.
    pub(crate) named: Fingerprint,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

impl Task {
    pub(crate) fn coming(&self, reserved: usize) -> Coming {
        Coming {
            card: self.card,
            reserved: reserved as u64,
            deadline: self.deadline,
            timeout: self.timeout,
        }
    }

    /// The error of ranks that do not come.
    pub(crate) fn late<'a>(
        &'a self,
        group: &'a Group,
    ) -> impl FnOnce(Vec<usize>) -> CollectiveError + use<'a> {
        move |ranks| self.named.late(group.behind(&ranks), self.timeout)
    }

    /// Writes down who of `ranks`, the parties of a round, came last.
    pub(crate) fn note(&self, recorder: &mut FlightRecorder, cards: Cards<'_>, ranks: &[usize]) {
        let arrived = |party: usize| cards.arrived_ns(party);
        if let Some(last) = (0..cards.parties()).max_by_key(|&party| arrived(party)) {
            let waited_ns = arrived(last).saturating_sub(self.card.arrived_ns);
            recorder.waited(ranks[last], waited_ns);
        }
    }
}
