//! The engine that sends messages: its state between calls, and the steps before data moves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fusestep_collective::{Begun, CollectiveError, Fingerprint};

use crate::agreed::Agreed;
use crate::group::Group;
use crate::library::Request;
use crate::meeting::Meeting;
use crate::native::Native;
use crate::party::Party;
use crate::watch;
use crate::wire::Header;

/// Least time between two looks for notices of the group's end, if calls are not compared. A look
/// takes 0.3 µs, and a call may take ten times that.
const POLL_NS: u64 = 100_000;

/// One rank's engine in a group of processes that send messages.
#[derive(Debug)]
pub(crate) struct ByMessages {
    pub(crate) group: Arc<Group>,
    meeting: Meeting,
    /// Messages of data under way.
    pub(crate) pending: Vec<(Request, usize)>,
    /// Contributions of other ranks to the part that this rank reduces. Words, so that elements are
    /// aligned.
    pub(crate) incoming: Vec<u64>,
    pub(crate) reduced: Vec<u64>,
    pub(crate) agreed: Agreed,
    pub(crate) native: Option<Native>,
    /// Time at which the call under way began, or at which all ranks had come to it, in nanoseconds
    /// since the group was founded.
    pub(crate) begun_ns: u64,
    /// Time of the last look for notices of the group's end.
    polled_ns: u64,
    /// Whether other groups have written their recorders because of this one.
    has_told: bool,
}

impl ByMessages {
    pub(crate) fn new(group: Arc<Group>, native: Option<Native>) -> Self {
        watch::register(&group);
        if native.is_some() {
            watch::register_timed(&group);
        }
        Self {
            meeting: Meeting::default(),
            pending: Vec::new(),
            incoming: Vec::new(),
            reduced: Vec::new(),
            agreed: Agreed::default(),
            native,
            begun_ns: 0,
            polled_ns: 0,
            has_told: false,
            group,
        }
    }

    /// Returns an error if the group has ended or a rank of the call has left.
    fn ended(&self, party: Party) -> Result<(), CollectiveError> {
        if let Some(error) = self.group.settled() {
            return Err(error);
        }
        if self.group.is_ending() {
            return Err(self.group.settle_as_told());
        }
        self.group.left(party).map_or(Ok(()), Err)
    }

    /// Exchanges headers and compares fingerprints.
    pub(crate) fn meet(
        &mut self,
        begun: &mut Begun<'_>,
        party: Party,
        header: Header,
    ) -> Result<&[Header], CollectiveError> {
        self.group.poll();
        self.ended(party)?;
        if let Some(last) = self.meeting.meet(&self.group, party, header, begun.deadline)? {
            let waited_ns = u64::try_from(last.waited.as_nanos()).unwrap_or(u64::MAX);
            begun.waited(last.rank, waited_ns);
        }
        let headers = self.meeting.headers();
        Fingerprint::compare(headers.len(), |rank| &headers[rank].fingerprint)?;
        Ok(self.meeting.headers())
    }

    /// Has the other groups write their flight recorders, once. The recorder of a communication
    /// stream says little about why a rank is missing.
    pub(crate) fn tell_others(&mut self) {
        if !std::mem::replace(&mut self.has_told, true) {
            watch::dump_others(&self.group);
        }
    }

    /// Enters a call that is not compared, unless the group has ended.
    pub(crate) fn enter(&mut self, begun: &Begun<'_>) -> Result<(), CollectiveError> {
        self.begun_ns = begun.arrived_ns;
        // A notice that comes after the look goes unheard until the deadline in any case.
        if self.begun_ns.saturating_sub(self.polled_ns) >= POLL_NS {
            self.group.poll();
            self.polled_ns = self.begun_ns;
        }
        self.ended(Party::All(begun.print.sequence))?;
        self.group.entered.store(begun.print.sequence, Ordering::Release);
        Ok(())
    }
}
