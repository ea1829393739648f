//! Sessions: the memory that a process shares with others, and its place among them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;

use crate::heap::{Arena, Heap};
use crate::layout::{BlockPlan, GroupHead, Process, SessionHead};
use crate::life::Life;
use crate::segment::{HUGE_PAGE_BYTES, PAGE_BYTES, Segment};

/// Most bytes of all ranks' parts of the second file, since file systems have a longest file.
const SECOND_BYTES: u64 = 4 << 40;

/// Most bytes that a process maps for a session: an address has 47 bits.
const MAPPED_BYTES: u64 = 32 << 40;

/// Bits of a process's beginning in the word that names it.
const BEGAN_BITS: u32 = 42;

/// The segment, mapped by all ranks, and this rank's place in it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) segment: Arc<Segment>,
    pub(crate) heap: Arc<Heap>,
    /// The ranks' processes.
    pub(crate) lives: Vec<Life>,
    pub(crate) rank: usize,
    /// Blocks of groups that this process has made and given up; others may still use them.
    retired: Mutex<Vec<Arena>>,
}

impl Session {
    pub(crate) fn new(segment: Segment, plan: SessionPlan, rank: usize) -> Self {
        let processes: &[Process] = segment.list_at(plan.processes(), plan.world_size);
        let lives = processes.iter().filter_map(|word| life_in(&word.0));
        let lives = lives.collect();
        let segment = Arc::new(segment);
        Self {
            heap: Arc::new(Heap::new(Arc::clone(&segment), plan.parts(rank))),
            segment,
            lives,
            rank,
            retired: Mutex::default(),
        }
    }

    /// Takes the block of a group that this process has given up.
    pub(crate) fn retire(&self, block: Arena) {
        self.retired().push(block);
    }

    /// Frees retired blocks that no rank uses any more.
    pub(crate) fn collect(&self) {
        self.retired().retain(|block| self.is_used(block));
    }

    fn is_used(&self, block: &Arena) -> bool {
        let head: &GroupHead = self.segment.at(block.offset());
        head.users.load(Ordering::SeqCst) > 0
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Session {
    /// Leaves blocks that other ranks still use. A rank whose last call is over may not have looked
    /// yet how the call ended. If the block were freed meanwhile, that call would never end.
    fn drop(&mut self) {
        let retired = std::mem::take(&mut *self.retired());
        for block in retired {
            if self.is_used(&block) {
                block.leave();
            }
        }
    }
}

/// Layout of the segment for a number of ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionPlan {
    pub(crate) world_size: usize,
    /// Bytes of each rank's part of both files.
    pub(crate) part_bytes: [u64; 2],
}

impl SessionPlan {
    /// Parts as long as the machine's memory, since only used memory takes any. Parts are shorter
    /// where a process may not map as much.
    pub(crate) fn new(world_size: usize) -> Self {
        let info = sysinfo();
        let memory = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)));
        // Half of the allowed memory, since the program has memory of its own.
        let limit = getrlimit(Resource::As).current.map_or(MAPPED_BYTES, |limit| limit / 2);
        Self::within(world_size, memory, limit.min(MAPPED_BYTES))
    }

    /// Parts as long as `memory`, or shorter, so that the parts of all ranks in both files fit
    /// `mapped` bytes.
    fn within(world_size: usize, memory: u64, mapped: u64) -> Self {
        let whole = |bytes: u64| bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        let ranks = world_size as u64;
        let part = memory.next_multiple_of(HUGE_PAGE_BYTES).min(whole(mapped / 2 / ranks));
        Self { world_size, part_bytes: [part, part.min(whole(SECOND_BYTES / ranks))] }
    }

    pub(crate) fn processes(self) -> u64 {
        size_of::<SessionHead>() as u64
    }

    /// The block of the group of all ranks.
    pub(crate) fn world(self) -> u64 {
        let processes = (self.world_size * size_of::<Process>()) as u64;
        (self.processes() + processes).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes before the ranks' parts.
    pub(crate) fn head_bytes(self) -> u64 {
        let block = BlockPlan::new(self.world_size).bytes();
        (self.world() + block).next_multiple_of(PAGE_BYTES)
    }

    fn first_part(self) -> u64 {
        self.head_bytes().next_multiple_of(HUGE_PAGE_BYTES)
    }

    /// Lengths of both files.
    pub(crate) fn file_bytes(self) -> [u64; 2] {
        let [first, second] = self.part_bytes;
        let ranks = self.world_size as u64;
        [self.first_part() + ranks * first, ranks * second]
    }

    /// The parts of one rank: offsets and lengths.
    pub(crate) fn parts(self, rank: usize) -> [(u64, u64); 2] {
        let ([first, second], rank) = (self.part_bytes, rank as u64);
        let starts = [self.first_part(), self.file_bytes()[0]];
        [(starts[0] + rank * first, first), (starts[1] + rank * second, second)]
    }
}

/// The word that names a process, never 0. One store writes it, so it is there as a whole or not at
/// all.
pub(crate) fn word_of(life: Life) -> u64 {
    life.process << BEGAN_BITS | life.began & ((1 << BEGAN_BITS) - 1)
}

/// The process that a word names, if it names one.
pub(crate) fn life_in(word: &AtomicU64) -> Option<Life> {
    let word = word.load(Ordering::SeqCst);
    let life = Life { process: word >> BEGAN_BITS, began: word & ((1 << BEGAN_BITS) - 1) };
    (word != 0).then_some(life)
}

#[cfg(test)]
mod tests {
    use fusestep_coalesce::MemoryOwner;

    use super::*;
    use crate::group::Group;

    /// The block of a group of two ranks, after the session of its leader has ended.
    fn block_after(users: u32) -> Vec<u8> {
        let plan = SessionPlan { world_size: 2, part_bytes: [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES] };
        let files: Vec<_> = plan
            .file_bytes()
            .map(|len| {
                let file = tempfile::tempfile().unwrap();
                file.set_len(len).unwrap();
                file
            })
            .into();
        let session = Session::new(Segment::map(files).unwrap(), plan, 0);
        // What the other rank has mapped.
        let other = Arc::clone(&session.segment);
        let mut block = Group::found(&session, 2).unwrap();
        let (offset, len) = (block.offset(), block.bytes().len());
        block.bytes_mut().fill(7);
        let head: &GroupHead = other.at(offset);
        head.users.store(users, Ordering::SeqCst);
        session.retire(block);
        drop(session);
        let bytes = other.address(offset, len);
        // SAFETY: inside of the mapping, which `other` keeps, and nobody writes to it.
        unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec()
    }

    #[test]
    fn parts_fit_into_what_a_process_may_map() {
        let gib = 1 << 30;
        for (ranks, memory, mapped) in [
            (2, 16 * gib, 1 << 45),
            (2, 16 * gib, 4 * gib),
            (1024, 512 * gib, 1 << 45),
            (8, gib, 0),
        ] {
            let plan = SessionPlan::within(ranks, memory, mapped);
            let parts: u64 = plan.part_bytes.iter().sum();
            assert!(parts * ranks as u64 <= mapped, "{ranks} ranks");
            assert!(plan.part_bytes.iter().all(|part| part % HUGE_PAGE_BYTES == 0));
            assert!(plan.part_bytes[0] <= memory.next_multiple_of(HUGE_PAGE_BYTES));
        }
        assert_eq!(SessionPlan::within(2, 16 * gib, 1 << 45).part_bytes[0], 16 * gib);
    }

    #[test]
    fn a_block_that_a_rank_still_uses_outlives_its_leader() {
        let block = block_after(1);
        assert!(block.iter().filter(|&&byte| byte == 7).count() > block.len() - 8);
        assert!(block_after(0).iter().all(|&byte| byte == 0), "given back");
    }
}
