//! Turns of the ranks: one rank runs at a time, drawn by the seed, so that a run can be repeated
//! step by step.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fusestep_collective::CollectiveError;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Fault of the rank that makes a certain event, which is a call between ranks or a call to the
/// disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankFault {
    /// The rank's process ends at the event.
    Death,
    /// The rank does not go on until all others wait for it, and beyond their deadline.
    Stall,
}

/// Bytes that the ranks bring to a call between them, in rank order.
pub(super) type Brought = Arc<Vec<Vec<u8>>>;

/// A group's call: the group and the number of the call within it.
type CallId = (u64, u64);

/// The ranks of a world as threads, one of which runs at a time.
#[derive(Debug)]
pub(super) struct Schedule {
    inner: Mutex<Inner>,
    turns: Vec<Condvar>,
}

#[derive(Debug)]
struct Inner {
    rng: ChaCha8Rng,
    current: Option<usize>,
    ranks: Vec<Status>,
    events: u64,
    faults: BTreeMap<u64, RankFault>,
    /// Faults that have happened.
    happened: u64,
    closed: Option<CollectiveError>,
    calls: HashMap<CallId, PendingCall>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ready,
    Waiting,
    Stalled,
    Ended,
}

#[derive(Debug)]
struct PendingCall {
    label: String,
    brought: Vec<Option<Vec<u8>>>,
    all: Option<Brought>,
    taken: usize,
}

impl Schedule {
    pub(super) fn new(seed: u64, world: usize, faults: BTreeMap<u64, RankFault>) -> Self {
        let mut inner = Inner {
            rng: ChaCha8Rng::seed_from_u64(seed),
            current: None,
            ranks: vec![Status::Ready; world],
            events: 0,
            faults,
            happened: 0,
            closed: None,
            calls: HashMap::new(),
        };
        inner.choose();
        Self { inner: Mutex::new(inner), turns: (0..world).map(|_| Condvar::new()).collect() }
    }

    /// Events so far.
    pub(super) fn events(&self) -> u64 {
        self.lock().events
    }

    /// Deaths and stalls so far.
    pub(super) fn faults(&self) -> u64 {
        self.lock().happened
    }

    /// Waits for a rank's first turn.
    pub(super) fn begin(&self, rank: usize) {
        drop(self.wait(self.lock(), rank));
    }

    /// Ends a rank, which has nothing more to do.
    pub(super) fn end(&self, rank: usize) {
        let mut inner = self.lock();
        if inner.ranks[rank] != Status::Ended {
            inner.ranks[rank] = Status::Ended;
            self.pass_on(&mut inner);
        }
    }

    /// Makes an event that other ranks could see: the fault due at it happens, then any rank may go
    /// on.
    ///
    /// # Errors
    /// [`CollectiveError::Died`] if the rank's process has ended.
    pub(super) fn event(&self, rank: usize) -> Result<(), CollectiveError> {
        let mut inner = self.lock();
        let died = CollectiveError::Died { rank, calls: inner.events };
        if inner.ranks[rank] == Status::Ended {
            return Err(died);
        }
        let number = inner.events;
        inner.events += 1;
        let fault = inner.faults.get(&number).copied();
        inner.happened += u64::from(fault.is_some());
        match fault {
            Some(RankFault::Death) => {
                inner.ranks[rank] = Status::Ended;
                inner.close(died.clone());
                self.pass_on(&mut inner);
                return Err(died);
            }
            Some(RankFault::Stall) => inner.ranks[rank] = Status::Stalled,
            None => {}
        }
        self.pass_on(&mut inner);
        drop(self.wait(inner, rank));
        Ok(())
    }

    /// Brings a rank's bytes to a call of `members`, and returns the bytes of all once they have
    /// come.
    pub(super) fn exchange(
        &self,
        rank: usize,
        members: &[usize],
        call: CallId,
        label: &str,
        bytes: Vec<u8>,
    ) -> Result<Brought, CollectiveError> {
        self.event(rank)?;
        let mut inner = self.lock();
        if let Some(error) = &inner.closed {
            return Err(error.clone());
        }
        let place = members.iter().position(|&member| member == rank).unwrap_or(0);
        let pending = inner.calls.entry(call).or_insert_with(|| PendingCall {
            label: label.to_owned(),
            brought: vec![None; members.len()],
            all: None,
            taken: 0,
        });
        if pending.label != label {
            let error = CollectiveError::Refused {
                rank,
                operation: "call",
                reason: format!(
                    "expected {}, as another rank makes it, found {label}",
                    pending.label
                ),
            };
            inner.close(error.clone());
            return Err(error);
        }
        pending.brought[place] = Some(bytes);
        if pending.brought.iter().all(Option::is_some) {
            let all = pending.brought.iter_mut().filter_map(Option::take).collect();
            pending.all = Some(Arc::new(all));
            for &member in members {
                if inner.ranks[member] == Status::Waiting {
                    inner.ranks[member] = Status::Ready;
                }
            }
        } else {
            inner.ranks[rank] = Status::Waiting;
            self.pass_on(&mut inner);
            inner = self.wait(inner, rank);
        }
        let error = inner.closed.clone();
        let Some(pending) = inner.calls.get_mut(&call) else {
            return Err(error.unwrap_or(CollectiveError::Left { rank, calls: 0 }));
        };
        // A call that was complete before the group was closed still succeeds.
        let Some(all) = pending.all.clone() else {
            return Err(error.unwrap_or(CollectiveError::Left { rank, calls: 0 }));
        };
        pending.taken += 1;
        if pending.taken == members.len() {
            inner.calls.remove(&call);
        }
        Ok(all)
    }

    /// Ends all waits.
    pub(super) fn close(&self, error: CollectiveError) {
        self.lock().close(error);
    }

    /// The error that has ended all waits.
    pub(super) fn closed(&self) -> Option<CollectiveError> {
        self.lock().closed.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_on(&self, inner: &mut Inner) {
        inner.choose();
        if let Some(next) = inner.current {
            self.turns[next].notify_one();
        }
    }

    fn wait<'a>(&'a self, mut inner: MutexGuard<'a, Inner>, rank: usize) -> MutexGuard<'a, Inner> {
        while inner.current != Some(rank) {
            inner = self.turns[rank].wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner
    }
}

impl Inner {
    fn close(&mut self, error: CollectiveError) {
        self.closed.get_or_insert(error);
        self.release(Status::Waiting);
    }

    fn release(&mut self, from: Status) {
        for status in &mut self.ranks {
            if *status == from {
                *status = Status::Ready;
            }
        }
    }

    fn which(&self, status: Status) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank] == status).collect()
    }

    /// Draws the rank that goes on. If no rank can, the waiting ranks get an error that says why.
    fn choose(&mut self) {
        if self.which(Status::Ready).is_empty() {
            let (waiting, stalled) = (self.which(Status::Waiting), self.which(Status::Stalled));
            if !waiting.is_empty() {
                let ended = self.which(Status::Ended);
                self.close(match ended.first() {
                    _ if !stalled.is_empty() => CollectiveError::Late {
                        ranks: stalled,
                        operation: "call",
                        sequence: self.events,
                        bucket: None,
                        timeout_ms: 0,
                    },
                    Some(&rank) => CollectiveError::Left { rank, calls: self.events },
                    None => CollectiveError::Refused {
                        rank: waiting[0],
                        operation: "call",
                        reason: "all ranks wait for each other".to_owned(),
                    },
                });
            }
            self.release(Status::Stalled);
        }
        let ready = self.which(Status::Ready);
        self.current = match ready.len() {
            0 => None,
            count => Some(ready[self.rng.random_range(0..count)]),
        };
    }
}
