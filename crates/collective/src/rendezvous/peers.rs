//! Contributions of the parties to an open round, and the bytes of them that a party may write.

use std::ops::Range;

use super::contribution::{Brought, Part};
use super::place::Place;
use crate::sync::Ordering;

/// Contributions of all parties to a round, for one of the parties to use.
pub(crate) struct Peers<'a, H> {
    pub(super) places: &'a [Place<H>],
    pub(super) party: usize,
    /// Bytes of this party's part that are claimed for it and were not handed out yet.
    pub(super) reserved: usize,
    /// Whether this party's parts of replicas were handed out.
    pub(super) has_replicas: bool,
}

/// Bytes of a part of every party's writable memory, for one party alone to read and write.
pub(crate) struct Claim<'a, H> {
    places: &'a [Place<H>],
    part: usize,
    /// Range within the part; no other claim of this part in this round has any byte of it.
    range: Range<usize>,
}

/// One party's parts of everyone's replicas.
pub(crate) struct Replicas<'a, H> {
    places: &'a [Place<H>],
    part: usize,
    is_there: bool,
}

impl<'a, H> Peers<'a, H> {
    /// The number of parties.
    pub(crate) fn parties(&self) -> usize {
        self.places.len()
    }

    /// The header that `party` brought.
    pub(crate) fn header(&self, party: usize) -> &'a H {
        self.brought(party)
            .header
            .as_ref()
            .expect("a round opens when all have brought their header")
    }

    /// The bytes that `party` shares.
    pub(crate) fn shared(&self, party: usize) -> &'a [u8] {
        let brought = self.brought(party);
        // SAFETY: made from a `&[u8]` (`bring`) whose borrow lasts until its party returns from
        // `rendezvous`, which is after the departure of this one, and `Peers` does not
        // outlive `work`, hence not the departure.
        unsafe { std::slice::from_raw_parts(brought.shared, brought.shared_len) }
    }

    /// The bytes that were claimed for this party before the round; none when asked again.
    ///
    /// # Cost
    /// None: for a part that nobody else claims of, this spares the atomic addition.
    pub(crate) fn reserved(&mut self) -> Claim<'a, H> {
        Claim {
            places: self.places,
            part: self.party,
            range: 0..std::mem::take(&mut self.reserved),
        }
    }

    /// This party's part of each replica that `party` brought, to be written; none when asked
    /// again.
    pub(crate) fn replicas(&mut self) -> Replicas<'a, H> {
        Replicas {
            places: self.places,
            part: self.party,
            is_there: std::mem::take(&mut self.has_replicas),
        }
    }

    /// Takes the next `len` bytes of a part that nobody has taken yet, or all that is left if it is
    /// less. In the memory of a party whose part is shorter, the claim ends with that part. A claim
    /// of a used-up part is empty.
    ///
    /// # Panics
    /// If there are no more than `part` parties.
    /// # Cost
    /// One atomic addition; threads that claim bytes of the same part wait for each other's.
    pub(crate) fn claim(&self, part: usize, len: usize) -> Claim<'a, H> {
        let claimed = &self.places[part].claimed.0;
        // The count stops at the greatest number instead of beginning anew. Arrivals and departures
        // order what is done with the bytes.
        let claim = |start: usize| Some(start.saturating_add(len));
        let (Ok(start) | Err(start)) =
            claimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim);
        Claim { places: self.places, part, range: start..start.saturating_add(len) }
    }

    fn brought(&self, party: usize) -> &'a Brought<H> {
        brought(self.places, party)
    }
}

impl<H> Replicas<'_, H> {
    /// The parts in what `party` brought, replica by replica.
    pub(crate) fn of(&self, party: usize) -> impl ExactSizeIterator<Item = &[u8]> {
        self.parts(party).map(|part| {
            // SAFETY: as in `all_mut`; `&self` excludes `all_mut`.
            unsafe { std::slice::from_raw_parts(part.start, part.len) }
        })
    }

    /// The parts in what each party brought, in party order, to be written. Each comes with the
    /// number of its replica.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = (usize, &mut [u8])> {
        let replicas = &*self;
        let parties = 0..replicas.places.len();
        parties.flat_map(|party| {
            replicas.parts(party).enumerate().map(|(replica, part)| {
                // SAFETY: lifetime as in `Peers::shared`. Parts of one replica are disjoint
                // (`cuts`), replicas were brought by a `&mut` each, the parts with
                // this party's number are handed out to it alone and once (`Peers::replicas`), and
                // `&mut self` makes this the only use of them.
                (replica, unsafe { std::slice::from_raw_parts_mut(part.start, part.len) })
            })
        })
    }

    fn parts(&self, party: usize) -> impl ExactSizeIterator<Item = &Part> {
        let parties = self.places.len();
        let replicas =
            if self.is_there { brought(self.places, party).replicas.as_slice() } else { &[] };
        let own = self.part;
        replicas.chunks_exact(parties).map(move |parts| &parts[own])
    }
}

impl<H> Claim<'_, H> {
    /// The bytes that are claimed, counted from where the part begins; they may end beyond the end
    /// of the part.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// These bytes of what `party` has made writable.
    #[cfg(test)]
    pub(crate) fn writable(&self, party: usize) -> &[u8] {
        let (start, len) = self.place(party);
        // SAFETY: lifetime as in `Peers::shared`: the borrow of the places ends with `work`. The
        // bytes lie within the writable slice. No other claim of this round has them: parts
        // are disjoint (`cuts`), ranges of one part come from one counter that only
        // rises and begins after what was reserved, and that is handed out once. Claims of other
        // rounds are gone, nobody uses the bytes through their owner's `&mut` while that is
        // in `rendezvous`, and `&self` excludes `writable_mut`.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// These bytes of what `party` has made writable, to be written.
    pub(crate) fn writable_mut(&mut self, party: usize) -> &mut [u8] {
        let (start, len) = self.place(party);
        // SAFETY: as in `writable`; `&mut self` makes it the only use of this claim.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    /// These bytes of what each party has made writable, in party order, to be written.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let claim = &*self;
        (0..claim.places.len()).map(|party| {
            let (start, len) = claim.place(party);
            // SAFETY: as in `writable_mut`; parties lend different memory, since each brought a
            // `&mut` of its own.
            unsafe { std::slice::from_raw_parts_mut(start, len) }
        })
    }

    #[inline(always)]
    fn place(&self, party: usize) -> (*mut u8, usize) {
        let brought = brought(self.places, party);
        let part = &brought.parts[self.part];
        let (start, end) = (self.range.start.min(part.len()), self.range.end.min(part.len()));
        // SAFETY: `part` lies within the writable slice (`cuts`), and `start` within the part.
        (unsafe { brought.writable.add(part.start + start) }, end - start)
    }
}

/// The contribution of a party to the open round.
#[inline(always)]
fn brought<H>(places: &[Place<H>], party: usize) -> &Brought<H> {
    places[party].brought.with(|brought| {
        // SAFETY: `Peers` and `Claim`, which alone call this, exist while the round is open, and a
        // place is written only outside of open rounds (`rendezvous`).
        unsafe { &*brought }
    })
}
