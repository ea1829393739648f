//! What the calls of one rank, its aborters and its subgroups have in common: who has said what
//! about the end of the group.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, FlightRecorder, MAX_TIMEOUT};

use crate::engine::{Engine, Kind};
use crate::meeting::Party;
use crate::watch::{Armed, Deadline};
use crate::wire::Notice;
use crate::{MpiOptions, watch};

/// Longest time to wait for what others say about an error.
const MAX_GRACE: Duration = Duration::from_secs(5);

/// One rank's side of a group of processes.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) engine: Arc<Engine>,
    /// Processes of the job, by rank in this group.
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) tag: i32,
    /// As given, but for the timeout.
    pub(crate) options: MpiOptions,
    /// When its times count from.
    pub(crate) begun: Instant,
    /// Of a call that MPI may not come back from.
    pub(crate) deadline: Deadline,
    timeout_ns: AtomicU64,
    /// Calls of all ranks that this one has entered: for which it has sent, or need not send, its
    /// header.
    pub(crate) entered: AtomicU64,
    parent: Option<Arc<Group>>,
    /// The communicator's recorder once more, for those who end the process from another thread.
    pub(crate) mirror: Mutex<FlightRecorder>,
    state: Mutex<State>,
    /// Something is in `state`.
    told: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// What each rank says about the end, this one too.
    notices: Vec<Option<Notice>>,
    /// Ranks that left, and how many calls of all ranks they had entered.
    left: Vec<(u64, CollectiveError)>,
    /// What this rank's calls return from now on.
    settled: Option<CollectiveError>,
    children: Vec<Weak<Group>>,
}

/// What a rank needs to make a group.
pub(crate) struct Founding {
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) tag: i32,
    pub(crate) options: MpiOptions,
}

impl Group {
    pub(crate) fn new(
        engine: Arc<Engine>,
        founding: Founding,
        parent: Option<Arc<Group>>,
    ) -> Arc<Self> {
        let Founding { members, rank, tag, options } = founding;
        let begun = Instant::now();
        let recorder = FlightRecorder::new(rank, members.len(), options.recorded_calls, begun)
            .dumped_into(options.dump_folder.clone());
        let notices = vec![None; members.len()];
        let group = Arc::new(Self {
            engine,
            members,
            rank,
            tag,
            begun,
            deadline: Deadline::default(),
            timeout_ns: AtomicU64::new(nanoseconds(options.timeout)),
            options,
            entered: AtomicU64::new(0),
            parent: parent.clone(),
            mirror: Mutex::new(recorder),
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

    /// Nanoseconds since it was founded.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Ends the job, from another thread, if the result is not dropped within the timeout.
    pub(crate) fn watched(&self, now_ns: u64) -> Armed<'_> {
        let timeout_ns = self.timeout_ns.load(Ordering::SeqCst);
        self.deadline.set(now_ns.saturating_add(timeout_ns))
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns.load(Ordering::SeqCst))
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::SeqCst);
    }

    pub(crate) fn timeout_ms(&self) -> u64 {
        u64::try_from(self.timeout().as_millis()).unwrap_or(u64::MAX)
    }

    /// How long a rank that knows of an error waits for what the others say about it.
    pub(crate) fn grace(&self) -> Duration {
        (self.timeout() / 4).min(MAX_GRACE)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything is known about the end of the group.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Takes what others have said in the meantime, of this group and of those it was split from.
    pub(crate) fn poll(&self) {
        if let Some(parent) = &self.parent {
            parent.poll();
        }
        loop {
            let mut state = self.lock();
            let Some((process, bytes)) = self.engine.take(self.tag, Kind::Notice) else {
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

    /// Says once, to all ranks, that the group ends, unless this one has already. Does not wait.
    pub(crate) fn announce(&self, error: CollectiveError) {
        self.say(self.rank, error);
    }

    fn say(&self, origin: usize, error: CollectiveError) {
        let mut state = self.lock();
        self.told.store(true, Ordering::SeqCst);
        if state.notices[self.rank].is_some() {
            return;
        }
        self.engine.troubled.store(true, Ordering::SeqCst);
        let notice =
            Notice { origin, entered: self.entered.load(Ordering::SeqCst), error: error.clone() };
        for to in self.others() {
            let to = self.members[to];
            self.engine.send_and_forget(notice.to_bytes(), to, self.tag, Kind::Notice);
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
            self.engine.send_and_forget(notice.to_bytes(), to, self.tag, Kind::Notice);
        }
    }

    /// Whether a call can no longer open, as far as is known: a rank of `missing`, or the other
    /// side of a transfer, ends without having entered it.
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

    /// What ends a call because a rank has left before it, or the other side of a transfer; the
    /// lowest such rank.
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

    /// What was settled, if the group has ended for this rank.
    pub(crate) fn settled(&self) -> Option<CollectiveError> {
        if !self.is_told() {
            return None;
        }
        self.lock().settled.clone()
    }

    /// Settles on the same error as the others: waits for a moment for what they say, then takes
    /// what the lowest rank has found. Ranks that say anything at all are not late.
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

    /// Settles on an error of MPI itself.
    pub(crate) fn refused(&self, operation: &'static str, reason: String) -> CollectiveError {
        self.settle(self.failed(operation, reason))
    }

    /// The error that the notices so far amount to; kept.
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
        self.engine.keep_error(settled.clone());
        settled
    }

    /// The error of a group that somebody else has ended.
    pub(crate) fn settle_as_told(&self) -> CollectiveError {
        let own = self.lock().notices[self.rank].clone();
        self.settle(own.expect("asked only of a group that is ending").error)
    }

    /// What has ended the group, from any thread.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.poll();
        match self.settled() {
            None if self.is_ending() => Some(self.settle_as_told()),
            settled => settled,
        }
    }

    /// Writes the mirrored recorder, if there is a folder for it.
    pub(crate) fn dump(&self) -> Option<Result<PathBuf, String>> {
        let folder = self.options.dump_folder.as_ref()?;
        let mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        Some(mirror.dump(folder).map_err(|error| error.to_string()))
    }

    /// Ends the job because memory that MPI is using cannot be taken back: says why, leaves the
    /// recorder on disk, lets the others do the same.
    pub(crate) fn die(&self, error: CollectiveError) -> ! {
        let error = self.settle(error);
        let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        mirror.end(Err(&error));
        let place = mirror.place();
        drop(mirror);
        watch::say(&format!(
            "rank {}: {error}; data was under way, so the job is ended; {place}",
            self.rank
        ));
        watch::dump_others(self);
        // The others write theirs, too, before the launcher ends them.
        std::thread::sleep(self.grace());
        self.engine.abort()
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.min(MAX_TIMEOUT).as_nanos()).unwrap_or(u64::MAX)
}
