//! Groups: the state that ranks of a group share besides rounds, as who has left and how the group
//! ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, Pair, behind};
use fusestep_simd::Patience;
use rustix::time::{ClockId, clock_gettime};

use crate::heap::Arena;
use crate::layout::{
    BlockPlan, FAILED, GroupHead, Member, RECORD_WORDS, RoundHead, put_bytes, take_bytes,
};
use crate::place::Place;
use crate::session::Session;

/// Longest wait for the error of a rank that has closed a gate.
const WORDS_TIME: Duration = Duration::from_secs(1);

/// Sleep between two looks for that error.
const LOOK: Duration = Duration::from_micros(100);

/// One rank's side of a group.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) session: Arc<Session>,
    /// Offset of the group's block in the segment.
    pub(crate) block: u64,
    /// The session's ranks, by rank in this group.
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) patience: Patience,
    /// The beginning of the group's times, and the same by the clock of all processes.
    pub(crate) begun: Instant,
    pub(crate) begun_ns: u64,
    parent: Option<Arc<Group>>,
    /// Whether this rank has written its error down.
    published: Mutex<bool>,
    /// The block's memory, on the rank that leads the group.
    memory: Mutex<Option<Arena>>,
}

/// Facts that a rank needs to take its place in a group.
pub(crate) struct Founding {
    pub(crate) block: u64,
    pub(crate) members: Vec<usize>,
    pub(crate) rank: usize,
    pub(crate) memory: Option<Arena>,
    pub(crate) parent: Option<Arc<Group>>,
}

impl Group {
    pub(crate) fn new(session: Arc<Session>, founding: Founding) -> Arc<Self> {
        let now = clock_gettime(ClockId::Monotonic);
        Arc::new(Self {
            session,
            block: founding.block,
            patience: Patience::of(founding.members.len()),
            members: founding.members,
            rank: founding.rank,
            begun: Instant::now(),
            begun_ns: now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64,
            parent: founding.parent,
            published: Mutex::new(false),
            memory: Mutex::new(founding.memory),
        })
    }

    pub(crate) fn world_size(&self) -> usize {
        self.members.len()
    }

    fn plan(&self) -> BlockPlan {
        BlockPlan::new(self.members.len())
    }

    fn head(&self) -> &GroupHead {
        self.session.segment.at(self.block)
    }

    pub(crate) fn member(&self, rank: usize) -> &Member {
        let members = self.block + self.plan().members();
        &self.session.segment.list_at(members, self.members.len())[rank]
    }

    /// This rank's place at the table of all.
    pub(crate) fn place(&self) -> Place {
        Place {
            table: self.block + self.plan().round(),
            ranks: (0..self.members.len()).collect(),
            party: self.rank,
            round: 0,
            is_pair: false,
        }
    }

    /// This rank's place at the table of a pair's transfers.
    pub(crate) fn pair_place(&self, pair: Pair) -> Place {
        Place {
            table: self.block + self.plan().pair(pair),
            ranks: pair.ranks().to_vec(),
            party: pair.side(self.rank),
            round: 0,
            is_pair: true,
        }
    }

    pub(crate) fn is_alive(&self, rank: usize) -> bool {
        self.session.lives[self.members[rank]].is_alive()
    }

    pub(crate) fn died(&self, rank: usize) -> CollectiveError {
        let calls = self.member(rank).calls.load(Ordering::SeqCst);
        CollectiveError::Died { rank, calls }
    }

    /// This rank and an error of the group, numbered by the ranks of all processes. Ends the group
    /// of all processes, so that a rank that waits elsewhere hears of it.
    pub(crate) fn in_session(&self, error: CollectiveError) -> (usize, CollectiveError) {
        let rank = self.members[self.rank];
        let Some(mut whole) = self.parent.as_ref() else {
            return (rank, error);
        };
        while let Some(parent) = &whole.parent {
            whole = parent;
        }
        if whole.broken().as_ref() == Some(&error) {
            return (rank, error);
        }
        let error = error.in_world(&self.members);
        whole.close(error.clone());
        (rank, error)
    }

    /// Takes over the error that has ended the parent, from which this group was split.
    pub(crate) fn inherit(&self) {
        if let Some(parent) = &self.parent {
            parent.inherit();
            if self.head().broken.load(Ordering::SeqCst) == 0
                && let Some(error) = parent.broken()
            {
                self.close(error);
            }
        }
    }

    /// The first error other than a rank's leaving.
    pub(crate) fn broken(&self) -> Option<CollectiveError> {
        let rank = self.head().broken.load(Ordering::SeqCst).checked_sub(1)?;
        Some(self.error_of(rank as usize))
    }

    /// The first end of the group: an error, or a rank's leaving.
    pub(crate) fn first(&self) -> Option<CollectiveError> {
        let code = self.head().first.load(Ordering::SeqCst).checked_sub(1)?;
        let rank = code as usize / 2;
        if code % 2 == 1 {
            return self.left(rank);
        }
        Some(self.error_of(rank))
    }

    fn left(&self, rank: usize) -> Option<CollectiveError> {
        let calls = self.member(rank).left.load(Ordering::SeqCst);
        let calls = calls.checked_sub(1)?;
        Some(CollectiveError::Left { rank, calls })
    }

    fn error_of(&self, rank: usize) -> CollectiveError {
        let member = self.member(rank);
        let len = member.record_len.load(Ordering::SeqCst);
        let error = CollectiveError::from_bytes(&take_bytes(&member.record, len));
        error.unwrap_or_else(|| CollectiveError::Aborted {
            rank,
            reason: "an error that this version cannot read".to_owned(),
        })
    }

    /// The error that ends transfers with `peer`, if any.
    pub(crate) fn ends_transfer(&self, peer: usize) -> Option<CollectiveError> {
        self.broken().or_else(|| self.left(peer))
    }

    /// The error that has closed the group, as far as can be told without waiting.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.inherit();
        self.broken().or_else(|| self.first())
    }

    /// The error of the rank that has closed a gate, which comes a moment later than the closing.
    pub(crate) fn published(&self, find: impl Fn() -> Option<CollectiveError>) -> CollectiveError {
        let deadline = Instant::now() + WORDS_TIME;
        loop {
            if let Some(error) = find() {
                return error;
            }
            if Instant::now() > deadline {
                return self.close(CollectiveError::Aborted {
                    rank: self.rank,
                    reason: "a rank died while it said why the group ends".to_owned(),
                });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Ends the group for all ranks, and with it the groups that were split from it. Returns the
    /// first error, which holds.
    pub(crate) fn close(&self, error: CollectiveError) -> CollectiveError {
        let head = self.head();
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        if !*published {
            *published = true;
            let mut bytes = error.to_bytes();
            if bytes.len() > RECORD_WORDS * 8 {
                let reason: String = error.to_string().chars().take(200).collect();
                let rank = self.rank;
                bytes = CollectiveError::Aborted { rank, reason }.to_bytes();
            }
            let own = self.member(self.rank);
            put_bytes(&own.record, &bytes);
            own.record_len.store(bytes.len() as u64, Ordering::SeqCst);
            let code = self.rank as u32 + 1;
            let _ = head.broken.compare_exchange(0, code, set, get);
            let code = 2 * self.rank as u32 + 1;
            let _ = head.first.compare_exchange(0, code, set, get);
        }
        drop(published);
        self.shut();
        let broken = self.broken().unwrap_or(error);
        match self.first() {
            None | Some(CollectiveError::Left { .. }) => broken,
            Some(first) => first,
        }
    }

    /// Says that this rank makes no more calls.
    pub(crate) fn leave(&self, calls: u64) {
        let own = self.member(self.rank);
        own.left.store(calls + 1, Ordering::SeqCst);
        let code = 2 * self.rank as u32 + 2;
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        let _ = self.head().first.compare_exchange(0, code, set, get);
        self.shut();
    }

    /// Closes the gate of all ranks and wakes all ranks, also those that wait in transfers.
    fn shut(&self) {
        let segment = &self.session.segment;
        let table: &RoundHead = segment.at(self.block + self.plan().round());
        table.gate.0.fetch_or(FAILED, Ordering::SeqCst);
        table.notifier.0.notify();
        for rank in 0..self.members.len() {
            let peer = self.member(rank).transfer.load(Ordering::SeqCst) as usize;
            if let Some(peer) = peer.checked_sub(1).filter(|&peer| peer < self.members.len()) {
                for [sender, receiver] in [[rank, peer], [peer, rank]] {
                    let pair = Pair { sender, receiver };
                    let table: &RoundHead = segment.at(self.block + self.plan().pair(pair));
                    table.notifier.0.notify();
                }
            }
        }
    }

    /// Writes down the rank that this rank waits for in a transfer, or that the transfer has ended.
    pub(crate) fn set_transfer(&self, peer: Option<usize>) {
        let peer = peer.map_or(0, |peer| peer as u64 + 1);
        let own = self.member(self.rank);
        own.transfer.store(peer, Ordering::SeqCst);
    }

    /// The ranks that cause a delay for which this rank blames the ranks `late`; see [`behind`].
    pub(crate) fn behind(&self, late: &[usize]) -> Vec<usize> {
        behind(self.rank, self.members.len(), late, |rank| {
            let transfer = self.member(rank).transfer.load(Ordering::SeqCst);
            transfer.checked_sub(1).map(|peer| peer as usize)
        })
    }

    /// Makes a zeroed block for a new group of `ranks` in memory of this process.
    pub(crate) fn found(session: &Session, ranks: usize) -> std::io::Result<Arena> {
        session.collect();
        let memory = session.heap.allocate(BlockPlan::new(ranks).bytes() as usize)?;
        let head: &GroupHead = session.segment.at(memory.offset());
        head.users.store(ranks as u32, Ordering::SeqCst);
        Ok(memory)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.head().users.fetch_sub(1, Ordering::SeqCst);
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = memory.take() {
            self.session.retire(memory);
            self.session.collect();
        }
    }
}
