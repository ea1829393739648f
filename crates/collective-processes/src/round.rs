//! Rounds: every party brings a card, all wait for all, each works on what was brought, and none
//! goes on before all have finished. A round opens for all parties or for none.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fusestep_collective::CollectiveError;
use fusestep_simd::Patience;

use crate::card::Cards;
use crate::group::Group;
use crate::layout::{FAILED, Participant, RoundHead};
use crate::place::Place;
use crate::task::Task;

/// Longest wait for counted parties to write that they have arrived, before the late ranks are
/// named.
const SAYING_TIME: Duration = Duration::from_millis(100);

/// Sleep between two looks for what they write.
const LOOK: Duration = Duration::from_micros(100);

/// Why a round did not end well, and whether this rank's memory is in use.
pub(crate) enum Broken {
    /// Nobody uses this rank's memory.
    Ended(CollectiveError),
    /// Other ranks are alive and have not finished with memory that this rank has brought.
    InUse(CollectiveError),
}

/// A table, as it lies in the segment.
struct Table<'a> {
    head: &'a RoundHead,
    participants: &'a [Participant],
    place: &'a Place,
    group: &'a Group,
    target: u64,
    patience: Patience,
}

impl Group {
    /// Takes part in the next round at a table.
    ///
    /// `reserved` are bytes of this party's part that are claimed for it from the start; `work`
    /// must not wait for anything.
    pub(crate) fn round<R>(
        &self,
        place: &mut Place,
        task: &Task,
        reserved: usize,
        work: impl FnOnce(Cards<'_>) -> R,
    ) -> Result<R, Broken> {
        self.inherit();
        place.round += 1;
        let segment = &self.session.segment;
        let parties = place.ranks.len();
        let table = Table {
            head: segment.at(place.table),
            participants: segment.list_at(place.table + size_of::<RoundHead>() as u64, parties),
            target: place.round * parties as u64,
            group: self,
            patience: self.patience,
            place,
        };
        let participant = &table.participants[place.party];
        // Nobody reads this rank's entry now: readers are in an open round, the last one is over
        // for all who live (`depart`), and the next cannot open before the arrival below.
        task.card.write(&participant.card);
        participant.claimed.0.store(reserved as u64, Ordering::Relaxed);
        table.arrive().map_err(Broken::Ended)?;
        participant.arrived.store(place.round, Ordering::SeqCst);
        table.wait(task).map_err(Broken::Ended)?;
        // Peers may use this rank's memory from here on, whether the work returns or panics.
        let done =
            catch_unwind(AssertUnwindSafe(|| work(Cards { participants: table.participants })));
        let departed = table.depart(task);
        match done {
            Ok(result) => departed.map(|()| result),
            Err(panic) => resume_unwind(panic),
        }
    }
}

impl Table<'_> {
    fn gate(&self) -> u64 {
        self.head.gate.0.load(Ordering::SeqCst)
    }

    /// The participants with their ranks.
    fn parties(&self) -> impl Iterator<Item = (&Participant, usize)> {
        self.participants.iter().zip(self.place.ranks.iter().copied())
    }

    fn is_open(&self) -> bool {
        self.gate() & !FAILED >= self.target
    }

    /// The error that has ended the rounds at the table of a pair, apart from the gate. `None` for
    /// the table of all ranks, whose gate tells everything.
    fn ended(&self) -> Option<CollectiveError> {
        if !self.place.is_pair {
            return None;
        }
        self.group.ends_transfer(self.place.ranks[1 - self.place.party])
    }

    /// The failure behind a gate that was seen closed.
    fn failure(&self) -> CollectiveError {
        if self.place.is_pair {
            return self.group.published(|| self.ended());
        }
        self.group.published(|| self.group.first())
    }

    /// Counts one arrival in, unless the table is closed.
    fn arrive(&self) -> Result<(), CollectiveError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let add = |gate: u64| (gate & FAILED == 0).then(|| gate + 1);
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        let added = self.head.gate.0.fetch_update(set, get, add);
        added.map(|_| ()).map_err(|_| self.failure())
    }

    /// Closes the gate, unless the round is open; returns the arrivals that were counted then.
    fn close(&self) -> Option<u64> {
        let close = |gate: u64| (gate & !FAILED < self.target).then_some(gate | FAILED);
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        let closed = self.head.gate.0.fetch_update(set, get, close);
        self.head.notifier.0.notify();
        closed.ok()
    }

    /// Waits until all parties have come.
    fn wait(&self, task: &Task) -> Result<(), CollectiveError> {
        if self.gate() & !FAILED == self.target {
            self.head.notifier.0.notify();
            return Ok(());
        }
        let (mut dead, mut ended) = (None, None);
        let look = || {
            self.group.inherit();
            ended = self.ended();
            dead = self
                .dead(|participant| participant.arrived.load(Ordering::SeqCst) < self.place.round);
            dead = dead.or_else(|| self.dead(|_| true));
            dead.is_some() || ended.is_some()
        };
        let over = || self.is_open() || self.gate() & FAILED != 0;
        let notifier = &self.head.notifier.0;
        notifier.wait(self.patience, task.deadline, over, look);
        if self.is_open() {
            return Ok(());
        }
        let seen = self.gate();
        let Some(closed) = self.close() else {
            return Ok(());
        };
        if let Some(error) = ended {
            return Err(error);
        }
        // Another rank has closed the gate first and says why.
        if seen & FAILED != 0 || closed & FAILED != 0 {
            return Err(self.failure());
        }
        let error = match dead {
            Some(rank) => self.group.died(rank),
            None => task.named.late(self.group.behind(&self.late(closed)), task.timeout),
        };
        Err(self.group.close(error))
    }

    /// The first rank whose process is gone, among participants that `concerns` picks.
    fn dead(&self, concerns: impl Fn(&Participant) -> bool) -> Option<usize> {
        let concerned = self.parties().filter(|(participant, _)| concerns(participant));
        concerned.map(|(_, rank)| rank).find(|&rank| !self.group.is_alive(rank))
    }

    /// The ranks that were not counted when the gate was closed.
    fn late(&self, closed: u64) -> Vec<usize> {
        let parties = self.participants.len() as u64;
        let missing = (self.target - closed) as usize;
        debug_assert!(closed + parties >= self.target, "the round before is over");
        let end = Instant::now() + SAYING_TIME;
        loop {
            let is_late = |participant: &Participant| {
                participant.arrived.load(Ordering::SeqCst) < self.place.round
            };
            let parties = self.parties().filter(|(participant, _)| is_late(participant));
            let late: Vec<usize> = parties.map(|(_, rank)| rank).collect();
            // A party says that it has arrived a moment after it is counted, or dies in between.
            if late.len() == missing || Instant::now() > end {
                return late;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Ends the round for this party. No living rank uses its memory then, except as
    /// [`Broken::InUse`] says.
    fn depart(&self, task: &Task) -> Result<(), Broken> {
        let (head, round) = (self.head, self.place.round);
        self.participants[self.place.party].departed.0.store(round, Ordering::SeqCst);
        if head.departed.0.fetch_add(1, Ordering::SeqCst) + 1 == self.target {
            head.notifier.0.notify();
            return Ok(());
        }
        let over = || head.departed.0.load(Ordering::SeqCst) >= self.target;
        let is_in =
            |participant: &Participant| participant.departed.0.load(Ordering::SeqCst) < round;
        let alone = || {
            let mut others = self.parties().filter(|(participant, _)| is_in(participant));
            // Whether a rank is alive is asked first, since a rank that departs and then dies has
            // departed.
            others.all(|(participant, rank)| !self.group.is_alive(rank) || !is_in(participant))
        };
        let deadline = Instant::now() + task.timeout;
        let notifier = &head.notifier.0;
        if notifier.wait(self.patience, deadline, over, alone) {
            return Ok(());
        }
        let still_in = || self.parties().filter(|(participant, _)| is_in(participant));
        let still_in = || still_in().map(|(_, rank)| rank);
        let (mut in_use, dead) =
            still_in().partition::<Vec<_>, _>(|&rank| self.group.is_alive(rank));
        in_use.retain(|&rank| still_in().any(|other| other == rank));
        match (in_use.is_empty(), dead.first()) {
            (true, None) => Ok(()),
            (true, Some(&rank)) => Err(Broken::Ended(self.group.died(rank))),
            (false, _) => {
                let late = task.card.print.late(in_use, task.timeout);
                Err(Broken::InUse(late))
            }
        }
    }
}
