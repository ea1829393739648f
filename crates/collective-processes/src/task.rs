//! What a call says and how long it waits, in all of its rounds.

use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, Fingerprint, FlightRecorder};

use crate::card::{Card, Cards};

/// One call as all its rounds need it.
pub(crate) struct Task {
    pub(crate) card: Card,
    /// As it is named when ranks are late: a receive is compared as a send.
    pub(crate) named: Fingerprint,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

impl Task {
    /// Requires that all of `ranks`, the parties of a round, do the same, and writes down who came
    /// last.
    pub(crate) fn agree(
        &self,
        recorder: &mut FlightRecorder,
        cards: Cards<'_>,
        ranks: &[usize],
    ) -> Result<(), CollectiveError> {
        let compared = cards.compare(&self.card.print);
        compared.map_err(|error| error.with_ranks(ranks))?;
        let arrived = |party: usize| cards.arrived_ns(party);
        if let Some(last) = (0..cards.parties()).max_by_key(|&party| arrived(party)) {
            let waited_ns = arrived(last).saturating_sub(self.card.arrived_ns);
            recorder.waited(ranks[last], waited_ns);
        }
        Ok(())
    }
}
