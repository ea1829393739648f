//! Exchange of headers before data moves: every rank tells every other which call it is about to
//! make. No rank waits for ever.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fusestep_collective::CollectiveError;
use fusestep_simd::Polling;

use crate::group::Group;
use crate::library::{Kind, Request};
use crate::party::Party;
use crate::wire::{HEADER_BYTES, Header};

/// Polls between two looks at the clock and at notices of other ranks.
const POLLS: u32 = 32;

/// Pauses while waiting for messages. MPI wakes no thread, and moves data only while it is polled.
pub(crate) const POLLING: Polling =
    Polling { keep: Duration::from_micros(30), offer: Duration::from_millis(2) };

/// Name of the operation in the error of headers that do not come through.
const EXCHANGE: &str = "exchange of fingerprints";

/// The buffers of the exchange of headers, used by call after call.
#[derive(Debug, Default)]
pub(crate) struct Meeting {
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// Messages under way, each with the other rank and the direction.
    pending: Vec<(Request, usize, Direction)>,
    headers: Vec<Header>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    To,
    From,
}

/// Rank whose header came last, and how long this rank waited for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Straggler {
    pub(crate) rank: usize,
    pub(crate) waited: Duration,
}

impl Meeting {
    /// Exchanges headers. [`headers`](Self::headers) returns those of all ranks, or of the pair,
    /// afterwards.
    ///
    /// Either all ranks come to the data of a call or none. A rank that knows of an error waits a
    /// moment for the others' notices, and goes on if all headers come after all.
    pub(crate) fn meet(
        &mut self,
        group: &Group,
        party: Party,
        header: Header,
        deadline: Instant,
    ) -> Result<Option<Straggler>, CollectiveError> {
        let peers: Vec<usize> = match party {
            Party::All(call) => {
                group.entered.store(call, Ordering::SeqCst);
                group.others().collect()
            }
            Party::Pair(peer) => vec![peer],
        };
        self.start(group, &peers, header, party)?;
        let begun = Instant::now();
        let (mut polls, mut straggler, mut limit) = (0u32, None, None);
        loop {
            if self.advance(group, begun, &mut straggler)? {
                break;
            }
            polls = polls.wrapping_add(1);
            if !polls.is_multiple_of(POLLS) {
                continue;
            }
            let now = Instant::now();
            POLLING.pause(now - begun);
            group.poll();
            if let Some(error) = group.left(party) {
                self.give_up();
                return Err(error);
            }
            if limit.is_none() && now > deadline {
                group.announce(header.fingerprint.late(self.missing(), group.timeout.get()));
            }
            if group.is_ending() {
                let limit = *limit.get_or_insert(now + group.grace());
                if group.cannot_open(party, &self.missing()) || now > limit {
                    self.give_up();
                    return Err(group.settle_as_told());
                }
            }
        }
        self.read(group, &peers, header)?;
        Ok(straggler)
    }

    /// Headers of the last exchange, in rank order: of all ranks, or of the two ranks of a
    /// transfer.
    pub(crate) fn headers(&self) -> &[Header] {
        &self.headers
    }

    fn start(
        &mut self,
        group: &Group,
        peers: &[usize],
        header: Header,
        party: Party,
    ) -> Result<(), CollectiveError> {
        let kind = match party {
            Party::All(_) => Kind::Header,
            Party::Pair(_) => Kind::TransferHeader,
        };
        self.outgoing.clear();
        self.outgoing.extend_from_slice(&header.to_bytes());
        self.incoming.clear();
        self.incoming.resize(peers.len() * HEADER_BYTES, 0);
        self.pending.clear();
        let mut failed = None;
        for (bytes, &peer) in self.incoming.chunks_exact_mut(HEADER_BYTES).zip(peers) {
            // SAFETY: `incoming` is touched again only when all requests are done (`read`, the next
            // `start`), or never, because `give_up` leaks it. The same holds for
            // `outgoing` below.
            match unsafe { group.mpi.receive(bytes, group.members[peer], group.tag, kind) } {
                Ok(request) => self.pending.push((request, peer, Direction::From)),
                Err(reason) => failed = Some(reason),
            }
        }
        for &peer in peers {
            // SAFETY: as above.
            let sent =
                unsafe { group.mpi.send(&self.outgoing, group.members[peer], group.tag, kind) };
            match sent {
                Ok(request) => self.pending.push((request, peer, Direction::To)),
                Err(reason) => failed = Some(reason),
            }
        }
        failed.map_or(Ok(()), |reason| {
            self.give_up();
            Err(group.failed(header.fingerprint.operation.name(), reason))
        })
    }

    /// Whether all messages are through; notes the rank that came last.
    fn advance(
        &mut self,
        group: &Group,
        begun: Instant,
        straggler: &mut Option<Straggler>,
    ) -> Result<bool, CollectiveError> {
        let mut failed = None;
        self.pending.retain_mut(|(request, peer, direction)| match group.mpi.done(request) {
            Ok(true) => {
                if *direction == Direction::From {
                    *straggler = Some(Straggler { rank: *peer, waited: begun.elapsed() });
                }
                false
            }
            Ok(false) => true,
            Err(reason) => {
                failed = Some(reason);
                true
            }
        });
        match failed {
            None => Ok(self.pending.is_empty()),
            Some(reason) => {
                self.give_up();
                Err(group.failed(EXCHANGE, reason))
            }
        }
    }

    /// Ranks whose headers have not arrived; if all have, ranks that have not taken this rank's
    /// header.
    fn missing(&self) -> Vec<usize> {
        let from = self.pending.iter().filter(|(_, _, direction)| *direction == Direction::From);
        let mut ranks: Vec<usize> = from.map(|(_, peer, _)| *peer).collect();
        if ranks.is_empty() {
            ranks = self.pending.iter().map(|(_, peer, _)| *peer).collect();
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn read(&mut self, group: &Group, peers: &[usize], own: Header) -> Result<(), CollectiveError> {
        self.headers.clear();
        for (peer, bytes) in peers.iter().zip(self.incoming.chunks_exact(HEADER_BYTES)) {
            let header = Header::from_bytes(bytes).ok_or_else(|| {
                let reason = format!(
                    "a header of rank {peer} that this program cannot read; start the same \
                     program on all ranks"
                );
                group.failed(EXCHANGE, reason)
            })?;
            self.headers.push(header);
        }
        let place = peers.partition_point(|&peer| peer < group.rank);
        self.headers.insert(place, own);
        Ok(())
    }

    /// Leaks memory that messages may still use. The group has ended, so this happens once.
    fn give_up(&mut self) {
        Vec::leak(std::mem::take(&mut self.outgoing));
        Vec::leak(std::mem::take(&mut self.incoming));
        self.pending.clear();
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // After a panic in between; all other ways leave nothing pending.
        if !self.pending.is_empty() {
            self.give_up();
        }
    }
}
