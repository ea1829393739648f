//! What lies in the shared segment besides data: atomics only, so that any process may look at any
//! time, and any bytes are values.

use std::sync::atomic::{AtomicU32, AtomicU64};

use fusestep_collective::{Fingerprint, ReduceUpdate};

/// Says that a file is a segment of this version.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"fusestp1");

/// The bit of a gate that says it has failed; the others count arrivals.
pub(crate) const FAILED: u64 = 1 << 63;

/// The bit of a rendezvous that has failed because ranks had not come in time, and not because one
/// had died.
pub(crate) const LATE: u64 = 1 << 62;

/// Words of a fingerprint.
pub(crate) const PRINT_WORDS: usize = Fingerprint::WIRE_BYTES / 8;

/// Words of what a rank says in a round.
pub(crate) const CARD_WORDS: usize = PRINT_WORDS + 7 + ReduceUpdate::MAX_REPLICAS;

/// Words of an error's bytes; it is cut to fewer.
pub(crate) const RECORD_WORDS: usize = 384;

/// Words of a folder's name.
const PATH_WORDS: usize = 64;

/// A type that may lie in the segment.
///
/// # Safety
/// It consists of atomic integers only, without padding that matters, and is of a fixed layout.
pub(crate) unsafe trait Shared {}

/// Alone on its cache lines: who waits for it disturbs nobody.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Padded<T>(pub(crate) T);

/// Wakes processes.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Notifier {
    /// Changes with every notification.
    pub(crate) word: AtomicU32,
    /// Those who wait in the system's queue, or died there.
    pub(crate) sleepers: AtomicU32,
}

/// The beginning of the segment.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct SessionHead {
    pub(crate) magic: AtomicU64,
    pub(crate) world_size: AtomicU64,
    /// Bytes of each rank's part of this file, and of the second one.
    pub(crate) part_bytes: [AtomicU64; 2],
    /// Name of the second file.
    pub(crate) second: [AtomicU64; PATH_WORDS],
    pub(crate) second_len: AtomicU64,
    /// Ranks that have mapped the segment, [`FAILED`] and [`LATE`].
    pub(crate) gate: AtomicU64,
    pub(crate) notifier: Notifier,
}

/// A rank's process in one word; 0 until it comes.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Process(pub(crate) AtomicU64);

/// What the participants of a round have in common; they lie behind it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RoundHead {
    /// Arrivals of all rounds, and [`FAILED`]. Round `k` is open once `k · parties` is reached.
    pub(crate) gate: Padded<AtomicU64>,
    /// Departures of all rounds.
    pub(crate) departed: Padded<AtomicU64>,
    pub(crate) notifier: Padded<Notifier>,
}

/// The place of one party.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Participant {
    /// The last round it has arrived at.
    pub(crate) arrived: AtomicU64,
    pub(crate) card: [AtomicU64; CARD_WORDS],
    /// The last round it has departed from.
    pub(crate) departed: Padded<AtomicU64>,
    /// Bytes of its part that are claimed.
    pub(crate) claimed: Padded<AtomicU64>,
}

/// How a group ends. Its members lie behind it.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct GroupHead {
    /// What ended the group first: twice the rank and 1 if it left, plus 1; 0 while all is well.
    pub(crate) first: AtomicU32,
    /// The rank that published the first error other than a rank's leaving, plus 1.
    pub(crate) broken: AtomicU32,
    /// Ranks that have not given it up; the block is free at 0.
    pub(crate) users: AtomicU32,
}

/// What a rank of a group says about itself.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Member {
    /// Calls it had begun when it left, plus 1.
    pub(crate) left: AtomicU64,
    /// Calls it has begun.
    pub(crate) calls: AtomicU64,
    /// The other side of the transfer it waits in, plus 1.
    pub(crate) transfer: AtomicU64,
    /// Bytes of the error that it published.
    pub(crate) record_len: AtomicU64,
    pub(crate) record: [AtomicU64; RECORD_WORDS],
}

// SAFETY: atomics in `repr(C)`.
unsafe impl Shared for SessionHead {}
// SAFETY: as above.
unsafe impl Shared for Process {}
// SAFETY: as above.
unsafe impl Shared for RoundHead {}
// SAFETY: as above.
unsafe impl Shared for Participant {}
// SAFETY: as above.
unsafe impl Shared for GroupHead {}
// SAFETY: as above.
unsafe impl Shared for Member {}

/// Where the parts of a group's block lie, from its beginning on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPlan {
    ranks: u64,
}

impl BlockPlan {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks: ranks as u64 }
    }

    /// The ranks' [`Member`]s, behind the [`GroupHead`].
    pub(crate) fn members(self) -> u64 {
        size_of::<GroupHead>() as u64
    }

    /// The [`RoundHead`] of all ranks.
    pub(crate) fn round(self) -> u64 {
        self.members() + self.ranks * size_of::<Member>() as u64
    }

    /// The [`RoundHead`] of transfers from one rank to another.
    pub(crate) fn pair(self, (from, to): (usize, usize)) -> u64 {
        let index = from as u64 * self.ranks + to as u64;
        self.round() + round_bytes(self.ranks) + index * round_bytes(2)
    }

    pub(crate) fn bytes(self) -> u64 {
        self.pair((0, 0)) + self.ranks * self.ranks * round_bytes(2)
    }
}

fn round_bytes(parties: u64) -> u64 {
    (size_of::<RoundHead>() as u64) + parties * size_of::<Participant>() as u64
}

/// Longest name of the second file.
pub(crate) const PATH_BYTES: usize = PATH_WORDS * 8;

/// Writes bytes into words.
pub(crate) fn put_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(whole), std::sync::atomic::Ordering::Relaxed);
    }
}

/// Reads `len` bytes from words, or as many as there are.
pub(crate) fn take_bytes(words: &[AtomicU64], len: u64) -> Vec<u8> {
    let load = |word: &AtomicU64| word.load(std::sync::atomic::Ordering::Relaxed);
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| load(word).to_le_bytes()).collect();
    bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_block_follow_each_other_on_lines_of_their_own() {
        for ranks in [1, 2, 5, 64] {
            let plan = BlockPlan::new(ranks);
            let last = plan.pair((ranks - 1, ranks - 1));
            assert_eq!(last + round_bytes(2), plan.bytes());
            for offset in [plan.members(), plan.round(), plan.pair((0, 0)), last] {
                assert_eq!(offset % 128, 0);
            }
        }
    }

    #[test]
    fn bytes_come_back_from_words() {
        let words: [AtomicU64; 3] = std::array::from_fn(|_| AtomicU64::new(0));
        for text in ["", "a", "12345678", "123456789012345678901234"] {
            put_bytes(&words, text.as_bytes());
            assert_eq!(take_bytes(&words, text.len() as u64), text.as_bytes());
        }
    }
}
