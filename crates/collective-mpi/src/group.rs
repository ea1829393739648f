//! Group of ranks, which the calls of one rank, its aborters and its subgroups share. It keeps the
//! notices of ranks about the group's end.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, FlightRecorder, Timeout};

use crate::deadline::{Armed, Deadline};
use crate::library::{Kind, Mpi};
use crate::party::Party;
use crate::say::say;
use crate::wire::Notice;
use crate::{MpiOptions, watch};

/// Longest wait for other ranks' notices of an error.
const MAX_GRACE: Duration = Duration::from_secs(5);

/// One rank's side of a group of processes.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) mpi: Arc<Mpi>,
    /// Processes of the job, by rank in this group.
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) tag: i32,
    /// Options as given; the timeout may have been set anew since.
    pub(crate) options: MpiOptions,
    /// Time from which the group's nanoseconds count.
    pub(crate) begun: Instant,
    /// Deadline of a call from which MPI may not come back.
    pub(crate) deadline: Deadline,
    pub(crate) timeout: Timeout,
    /// Number of the last call of all ranks that this rank has entered. For an entered call this
    /// rank has sent its header, or needs to send none.
    pub(crate) entered: AtomicU64,
    parent: Option<Arc<Group>>,
    /// Copy of the communicator's flight recorder, for threads that end the process.
    pub(crate) mirror: Arc<Mutex<FlightRecorder>>,
    state: Mutex<State>,
    /// Whether `state` holds a notice, of an error or of a rank that left.
    told: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// Notice of each rank about the group's end, this rank's own included.
    notices: Vec<Option<Notice>>,
    /// Ranks that left, with the number of calls of all ranks that each had entered.
    left: Vec<(u64, CollectiveError)>,
    /// Error that this rank's calls return from now on.
    settled: Option<CollectiveError>,
    children: Vec<Weak<Group>>,
}

/// Members, rank, tag and options from which a rank makes a group.
pub(crate) struct Founding {
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) tag: i32,
    pub(crate) options: MpiOptions,
}

impl Group {
    pub(crate) fn new(mpi: Arc<Mpi>, founding: Founding, parent: Option<Arc<Group>>) -> Arc<Self> {
        let Founding { members, rank, tag, options } = founding;
        let begun = Instant::now();
        let recorder = FlightRecorder::new(rank, members.len(), options.recorded_calls, begun);
        let notices = vec![None; members.len()];
        let group = Arc::new(Self {
            mpi,
            members,
            rank,
            tag,
            begun,
            deadline: Deadline::default(),
            timeout: Timeout::new(options.timeout),
            options,
            entered: AtomicU64::new(0),
            parent: parent.clone(),
            mirror: Arc::new(Mutex::new(recorder)),
            state: Mutex::new(State {
                notices,
                left: Vec::new(),
                settled: None,
                children: Vec::new(),
            }),
            told: AtomicBool::new(false),
        });
        if let Some(parent) = parent {
            let mut state = parent.lock();
            state.children.retain(|child| child.strong_count() > 0);
            state.children.push(Arc::downgrade(&group));
            let known = state.notices[parent.rank].clone();
            drop(state);
            if let Some(notice) = known {
                group.announce(notice.error);
            }
        }
        group
    }

    pub(crate) fn world_size(&self) -> usize {
        self.members.len()
    }

    /// The other ranks.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.members.len()).filter(move |&rank| rank != own)
    }

    /// Nanoseconds since the group was founded.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sets the deadline of a call: another thread ends the job unless the result is dropped within
    /// the timeout.
    pub(crate) fn watched(&self, now_ns: u64) -> Armed<'_> {
        let timeout_ns = u64::try_from(self.timeout.get().as_nanos()).unwrap_or(u64::MAX);
        self.deadline.set(now_ns.saturating_add(timeout_ns))
    }

    /// The time for which a rank that knows of an error waits for the others' notices.
    pub(crate) fn grace(&self) -> Duration {
        (self.timeout.get() / 4).min(MAX_GRACE)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything is known about the end of the group.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Receives the notices that have arrived, of this group and of the groups that it was split
    /// from.
    pub(crate) fn poll(&self) {
        if let Some(parent) = &self.parent {
            parent.poll();
        }
        loop {
            let mut state = self.lock();
            let Some((process, bytes)) = self.mpi.take(self.tag, Kind::Notice) else {
                return;
            };
            let from = self.members.iter().position(|&member| member == process);
            let (Some(from), Some(notice)) = (from, Notice::from_bytes(&bytes)) else {
                continue;
            };
            match notice.error {
                CollectiveError::Left { .. } => {
                    state.left.push((notice.entered, notice.error));
                    self.told.store(true, Ordering::SeqCst);
                }
                _ => {
                    let echo = (notice.origin, notice.error.clone());
                    state.notices[from] = Some(notice);
                    drop(state);
                    self.say(echo.0, echo.1);
                }
            }
        }
    }

    /// Sends a notice of the group's end to all ranks, unless this rank has sent one already. Does
    /// not wait.
    pub(crate) fn announce(&self, error: CollectiveError) {
        self.say(self.rank, error);
    }

    fn say(&self, origin: usize, error: CollectiveError) {
        let mut state = self.lock();
        self.told.store(true, Ordering::SeqCst);
        if state.notices[self.rank].is_some() {
            return;
        }
        self.mpi.troubled.store(true, Ordering::SeqCst);
        let notice =
            Notice { origin, entered: self.entered.load(Ordering::SeqCst), error: error.clone() };
        for to in self.others() {
            let to = self.members[to];
            self.mpi.send_and_forget(notice.to_bytes(), to, self.tag, Kind::Notice);
        }
        state.notices[self.rank] = Some(notice);
        let children: Vec<_> = state.children.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for child in children {
            child.announce(error.clone());
        }
    }

    /// Tells all others that this rank makes no more calls.
    pub(crate) fn leave(&self, calls: u64) {
        if self.lock().notices[self.rank].is_some() {
            return;
        }
        let error = CollectiveError::Left { rank: self.rank, calls };
        let notice =
            Notice { origin: self.rank, entered: self.entered.load(Ordering::SeqCst), error };
        for to in self.others() {
            let to = self.members[to];
            self.mpi.send_and_forget(notice.to_bytes(), to, self.tag, Kind::Notice);
        }
    }

    /// Whether a call can no longer open. All ranks must have sent a notice, and a rank of
    /// `missing`, or the peer of a transfer, has not entered the call.
    pub(crate) fn cannot_open(&self, party: Party, missing: &[usize]) -> bool {
        let (call, missing) = match &party {
            Party::All(call) => (*call, missing),
            Party::Pair(peer) => (u64::MAX, std::slice::from_ref(peer)),
        };
        let state = self.lock();
        let never = |rank: &usize| {
            state.notices[*rank].as_ref().is_some_and(|notice| notice.entered < call)
        };
        state.notices.iter().all(Option::is_some) && missing.iter().any(never)
    }

    /// Whether any rank, this one included, has ended the group.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_told() && self.lock().notices[self.rank].is_some()
    }

    /// The error of a call that a rank, or the peer of a transfer, has left before; the error of
    /// the lowest such rank.
    pub(crate) fn left(&self, party: Party) -> Option<CollectiveError> {
        if !self.is_told() {
            return None;
        }
        let counts = |entered: u64, rank: usize| match party {
            Party::All(call) => entered < call,
            Party::Pair(peer) => rank == peer,
        };
        let rank_of = |error: &CollectiveError| match error {
            CollectiveError::Left { rank, .. } => *rank,
            _ => usize::MAX,
        };
        let state = self.lock();
        let gone = state.left.iter().map(|(entered, error)| (*entered, rank_of(error), error));
        let gone = gone.filter(|(entered, rank, _)| counts(*entered, *rank));
        gone.min_by_key(|(_, rank, _)| *rank).map(|(_, _, error)| error.clone())
    }

    /// The settled error, if the group has ended for this rank.
    pub(crate) fn settled(&self) -> Option<CollectiveError> {
        if !self.is_told() {
            return None;
        }
        self.lock().settled.clone()
    }

    /// Settles on the same error as the other ranks: waits a moment for their notices, then takes
    /// the error of the lowest rank that found one. A rank that has sent a notice is not late.
    pub(crate) fn settle(&self, error: CollectiveError) -> CollectiveError {
        if let Some(settled) = self.settled() {
            return settled;
        }
        self.announce(error);
        let deadline = Instant::now() + self.grace();
        while self.lock().notices.iter().any(Option::is_none) && Instant::now() < deadline {
            self.poll();
            std::thread::sleep(Duration::from_micros(50));
        }
        self.conclude()
    }

    /// An error of MPI itself.
    pub(crate) fn failed(&self, operation: &'static str, reason: String) -> CollectiveError {
        CollectiveError::engine(self.rank, operation, reason)
    }

    /// Derives the group's error from the notices so far, and keeps it.
    fn conclude(&self) -> CollectiveError {
        let mut state = self.lock();
        let said: Vec<usize> =
            (0..self.world_size()).filter(|&rank| state.notices[rank].is_some()).collect();
        let notices = state.notices.iter().flatten();
        let first = notices.min_by_key(|notice| notice.origin).map(|notice| notice.error.clone());
        let mut error = first.expect("this rank's own notice was given before");
        if let CollectiveError::Late { ranks, .. } = &mut error {
            let mut late: Vec<usize> = state
                .notices
                .iter()
                .flatten()
                .filter_map(|notice| match &notice.error {
                    CollectiveError::Late { ranks, .. } => Some(ranks.clone()),
                    _ => None,
                })
                .flatten()
                .filter(|rank| !said.contains(rank))
                .collect();
            late.sort_unstable();
            late.dedup();
            if !late.is_empty() {
                *ranks = late;
            }
        }
        let settled = state.settled.get_or_insert(error).clone();
        self.mpi.keep_error(settled.clone());
        settled
    }

    /// Settles on the error of a group that has a notice already.
    pub(crate) fn settle_as_told(&self) -> CollectiveError {
        let own = self.lock().notices[self.rank].clone();
        self.settle(own.expect("asked only of a group that is ending").error)
    }

    /// The error that has ended the group, if one has. Any thread may ask.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.poll();
        match self.settled() {
            None if self.is_ending() => Some(self.settle_as_told()),
            settled => settled,
        }
    }

    /// Writes the copy of the flight recorder, if there is a folder for it.
    pub(crate) fn dump(&self) -> Option<Result<PathBuf, String>> {
        let mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        let dumped = mirror.dump(mirror.folder()?);
        Some(dumped.map_err(|error| error.to_string()))
    }

    /// Ends the job, because memory that MPI is using cannot be taken back. Prints the error,
    /// writes the flight recorders, and gives other ranks time for theirs.
    pub(crate) fn die(&self, error: CollectiveError) -> ! {
        let error = self.settle(error);
        let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        mirror.end(Err(&error));
        let place = mirror.place();
        drop(mirror);
        say(&format!(
            "rank {}: {error}; data was under way, so the job is ended; {place}",
            self.rank
        ));
        watch::dump_others(self);
        // The other ranks write their flight recorders, too, before the launcher ends them.
        std::thread::sleep(self.grace());
        self.mpi.abort()
    }
}
