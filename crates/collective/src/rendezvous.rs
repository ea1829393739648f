//! Lending slices between threads that meet: the one place where ranks of a process touch each
//! other's memory.
//!
//! [`participants`] makes places for a fixed number of parties. In each round every party brings
//! one slice that all may read, and one that is cut into parts, whose bytes the parties claim. When
//! all have arrived, every party works on these slices; none returns before all have finished. A
//! round opens for all parties or for none. A failure (a deadline, a call of [`Rendezvous::fail`])
//! before the last arrival closes the rendezvous for ever. A later failure strikes the next round.

#[path = "rendezvous/contribution.rs"]
mod contribution;
#[path = "rendezvous/peers.rs"]
mod peers;
#[path = "rendezvous/place.rs"]
mod place;

use std::sync::Arc;

use crate::sync::{
    AtomicU64, AtomicUsize, Cell, Instant, Mutex, MutexGuard, Notifier, Ordering, PoisonError,
    yield_now,
};

use self::contribution::{Brought, bring, cuts, cuts_replicas};
use self::place::{Claimed, Place};

pub(crate) use self::contribution::{Contribution, MAX_REPLICAS};
pub(crate) use self::peers::{Claim, Peers};

/// The bit of the gate that says the rendezvous has failed; the other bits count arrivals.
const FAILED: u64 = 1 << 63;

/// A rendezvous, for someone who may only break it off; clones are the same rendezvous.
pub(crate) struct Rendezvous<H, F>(Arc<Inner<H, F>>);

/// The place of one party; the only way to take part, and by `&mut` only once at a time.
pub(crate) struct Participant<H, F> {
    rendezvous: Rendezvous<H, F>,
    party: usize,
    /// Rounds this party has arrived at.
    round: u64,
}

struct Inner<H, F> {
    places: Box<[Place<H>]>,
    /// Arrivals of all rounds, and [`FAILED`]. Round `k` (from 1) is open from the moment that `k
    /// · parties` is reached.
    gate: Padded,
    /// Departures of all rounds. Round `k` is over once `k · parties` is reached.
    departed: Padded,
    failure: Mutex<Option<F>>,
    notifier: Notifier,
}

/// A counter alone on its cache lines, so that spinning on one counter does not slow writes of
/// another.
#[repr(align(128))]
struct Padded(AtomicU64);

// SAFETY: `Brought` is written by its party alone, between the end of a round and its own arrival
// at the next, and read only while a round is open; arrival, opening and departure order these
// accesses (`Participant::rendezvous`). What its pointers lead to is shared as `&[u8]`, or written
// as disjoint `&mut [u8]`, both of which may be used from other threads. Headers are read by
// reference from all threads (`Sync`) and dropped by their party (`Send`).
unsafe impl<H: Send + Sync, F: Send> Sync for Inner<H, F> {}
// SAFETY: as above; between rounds the pointers are not followed at all.
unsafe impl<H: Send + Sync, F: Send> Send for Inner<H, F> {}

/// Places for `parties` parties; the index in the list is the party.
pub(crate) fn participants<H, F>(parties: usize) -> Vec<Participant<H, F>> {
    let place = || Place {
        arrived: AtomicU64::new(0),
        brought: Cell::new(Brought::nothing(parties)),
        claimed: Claimed(AtomicUsize::new(0)),
    };
    let rendezvous = Rendezvous(Arc::new(Inner {
        places: (0..parties).map(|_| place()).collect(),
        gate: Padded(AtomicU64::new(0)),
        departed: Padded(AtomicU64::new(0)),
        failure: Mutex::new(None),
        notifier: Notifier::new(parties),
    }));
    let participant = |party| Participant { rendezvous: rendezvous.clone(), party, round: 0 };
    (0..parties).map(participant).collect()
}

impl<H, F: Clone> Rendezvous<H, F> {
    /// Closes the rendezvous for ever, unless it is closed already: parties that wait for others,
    /// and all that come later, get `failure`. A round that is open goes on to its end. Returns
    /// the failure that holds, the first one.
    pub(crate) fn fail(&self, failure: F) -> F {
        let mut kept = self.lock();
        let first = kept.get_or_insert(failure).clone();
        self.0.gate.0.fetch_or(FAILED, Ordering::SeqCst);
        drop(kept);
        self.0.notifier.notify();
        first
    }

    /// Failure that closed the rendezvous, if it is closed.
    pub(crate) fn failure(&self) -> Option<F> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<F>> {
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one arrival in, unless the rendezvous has failed.
    fn arrive(&self) -> Result<(), F> {
        let added = self.0.gate.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |gate| {
            (gate & FAILED == 0).then(|| gate + 1)
        });
        added.map(|_| ()).map_err(|_| self.broken())
    }

    /// The failure behind a gate that was seen with [`FAILED`].
    fn broken(&self) -> F {
        self.failure().expect(
            "a failure is kept, under the lock, before anyone can see the gate fail or before the \
             lock is released",
        )
    }

    /// Closes the rendezvous because `round` did not open in time; `None` if it has opened after
    /// all.
    fn fail_late(&self, round: u64, name: impl FnOnce(&[usize]) -> F) -> Option<F> {
        let target = round * self.0.places.len() as u64;
        let mut kept = self.lock();
        let closed = self.0.gate.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |gate| {
            (gate & FAILED == 0 && gate < target).then_some(gate | FAILED)
        });
        match closed {
            Ok(gate) => {
                let present = self.0.places.len() as u64 - (target - gate);
                *kept = Some(name(&self.late(round, present as usize)));
            }
            Err(gate) if gate & !FAILED >= target => return None,
            Err(_) => {}
        }
        let failure = kept.clone();
        drop(kept);
        self.0.notifier.notify();
        failure
    }

    /// The parties that are not among the `present` ones of `round`.
    fn late(&self, round: u64, present: usize) -> Vec<usize> {
        loop {
            let places = self.0.places.iter().enumerate();
            let missing = places.filter(|(_, place)| place.arrived.load(Ordering::SeqCst) < round);
            let late: Vec<usize> = missing.map(|(party, _)| party).collect();
            // A party says that it has arrived a moment after it is counted.
            if late.len() + present == self.0.places.len() {
                return late;
            }
            yield_now();
        }
    }
}

impl<H, F> Clone for Rendezvous<H, F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<H, F: Clone> Participant<H, F> {
    /// The rendezvous this participant belongs to.
    pub(crate) fn of(&self) -> &Rendezvous<H, F> {
        &self.rendezvous
    }

    /// The number of parties.
    #[cfg(test)]
    pub(crate) fn parties(&self) -> usize {
        self.rendezvous.0.places.len()
    }

    /// The number of this party.
    #[cfg(test)]
    pub(crate) fn party(&self) -> usize {
        self.party
    }

    /// Takes part in the next round: brings `contribution`, waits for all parties, does `work` on
    /// what they brought, and waits until all parties have finished.
    ///
    /// # Errors
    /// The failure that closed the rendezvous. If a party has not come by `deadline`, the failure
    /// is what `late` makes of the missing parties.
    /// # Panics
    /// If `contribution.ends` does not cut `writable` into one part per party; with the panic of
    /// `work`, after all parties have finished.
    /// # Cost
    /// Two waits of the spin-then-park kind and no allocation. The second has no deadline: the
    /// memory is in use until all have departed, so `work` must not wait for anything.
    pub(crate) fn rendezvous<R>(
        &mut self,
        contribution: Contribution<'_, H>,
        deadline: Instant,
        late: impl FnOnce(&[usize]) -> F,
        work: impl FnOnce(&mut Peers<'_, H>) -> R,
    ) -> Result<R, F> {
        let inner = &*self.rendezvous.0;
        let parties = inner.places.len();
        assert!(
            cuts(contribution.ends, contribution.writable.len(), parties),
            "ends must rise from 0 to the length of `writable`, one for each party"
        );
        assert!(
            cuts_replicas(&contribution, parties),
            "ends must rise from 0 to the length of each replica, one for each party"
        );
        if inner.gate.0.load(Ordering::SeqCst) & FAILED != 0 {
            return Err(self.rendezvous.broken());
        }
        let place = &inner.places[self.party];
        let reserved = contribution.reserved;
        place.brought.with_mut(|brought| {
            // SAFETY: nobody reads this party's place now: readers are parties in an open round,
            // the last round this party was in is over (the wait in `Departure` saw all
            // departures), and the next cannot open without the arrival below.
            bring(unsafe { &mut *brought }, contribution)
        });
        // For the same reasons nobody claims now.
        place.claimed.0.store(reserved, Ordering::Relaxed);
        self.rendezvous.arrive()?;
        self.round += 1;
        place.arrived.store(self.round, Ordering::SeqCst);
        let target = self.round * parties as u64;
        let gate = || inner.gate.0.load(Ordering::SeqCst);
        let opened = || gate() & !FAILED >= target;
        if gate() & !FAILED == target {
            inner.notifier.notify()
        } else {
            if !inner.notifier.wait(|| opened() || gate() & FAILED != 0, Some(deadline))
                && let Some(failure) = self.rendezvous.fail_late(self.round, late)
            {
                return Err(failure);
            }
            // Once failed the gate counts no more, so all parties of this round see the same answer
            // here.
            if !opened() {
                return Err(self.rendezvous.broken());
            }
        }
        // From here on peers hold this party's memory: `Departure` waits for all of them, whether
        // `work` returns or panics.
        let _departure = Departure { inner, target };
        Ok(work(&mut Peers {
            places: &inner.places,
            party: self.party,
            reserved,
            has_replicas: true,
        }))
    }
}

/// The end of a round for one party.
struct Departure<'a, H, F> {
    inner: &'a Inner<H, F>,
    target: u64,
}

impl<H, F> Drop for Departure<'_, H, F> {
    fn drop(&mut self) {
        let departed = &self.inner.departed.0;
        if departed.fetch_add(1, Ordering::SeqCst) + 1 == self.target {
            return self.inner.notifier.notify();
        }
        let over = || departed.load(Ordering::SeqCst) >= self.target;
        while !self.inner.notifier.wait(over, None) {}
    }
}

impl<H, F> std::fmt::Debug for Rendezvous<H, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rendezvous").field("parties", &self.0.places.len()).finish()
    }
}

impl<H, F> std::fmt::Debug for Participant<H, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Participant")
            .field("party", &self.party)
            .field("round", &self.round)
            .finish()
    }
}
