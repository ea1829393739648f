//! Layout of the shared segment besides data: atomics only, so that any process may look at any
//! time, and any bytes are values.

use std::sync::atomic::{AtomicU32, AtomicU64};

use fusestep_collective::{Fingerprint, Pair, ReduceUpdate};

/// Word that marks a file as a segment of this version.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"fusestp1");

/// The bit of a gate that says it has failed; the other bits count arrivals.
pub(crate) const FAILED: u64 = 1 << 63;

/// The bit of a rendezvous that has failed because ranks had not come in time, not because a rank
/// had died.
pub(crate) const LATE: u64 = 1 << 62;

/// Words of a fingerprint.
pub(crate) const PRINT_WORDS: usize = Fingerprint::WIRE_BYTES / 8;

/// Words of a card: the words that a rank shows in a round.
pub(crate) const CARD_WORDS: usize = PRINT_WORDS + 7 + ReduceUpdate::MAX_REPLICAS;

/// Words of an error's bytes; a longer error is cut.
pub(crate) const RECORD_WORDS: usize = 384;

/// Words of a folder's name.
const PATH_WORDS: usize = 64;

/// A type that may lie in the segment.
///
/// # Safety
/// The type consists of atomic integers only, without padding that matters, and is of a fixed
/// layout.
pub(crate) unsafe trait Shared {}

/// A value alone on its cache lines, so that waiting for it disturbs nobody.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Padded<T>(pub(crate) T);

/// State of waiting processes, in the segment, and of those that wake them.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Notifier {
    /// Counter that changes with every notification.
    pub(crate) word: AtomicU32,
    /// Number of processes that wait in the system's queue, or died there.
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

/// State of rounds that their participants have in common; the participants lie behind it.
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
    /// The last round that the party has arrived at.
    pub(crate) arrived: AtomicU64,
    pub(crate) card: [AtomicU64; CARD_WORDS],
    /// The last round that the party has departed from.
    pub(crate) departed: Padded<AtomicU64>,
    /// Bytes that are claimed of the party's part.
    pub(crate) claimed: Padded<AtomicU64>,
}

/// The end of a group. The group's members lie behind it.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct GroupHead {
    /// The first end of the group: twice the rank and 1 if it left, plus 1; 0 while all is well.
    pub(crate) first: AtomicU32,
    /// The rank that published the first error other than a rank's leaving, plus 1.
    pub(crate) broken: AtomicU32,
    /// Ranks that have not given the group up; its block is free at 0.
    pub(crate) users: AtomicU32,
}

/// Facts that a rank of a group tells about itself.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Member {
    /// Calls that the rank had begun when it left, plus 1.
    pub(crate) left: AtomicU64,
    /// Calls that the rank has begun.
    pub(crate) calls: AtomicU64,
    /// The other side of the transfer that the rank waits in, plus 1.
    pub(crate) transfer: AtomicU64,
    /// Length in bytes of the error that the rank published.
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

/// Offsets of the parts of a group's block, from its beginning on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPlan {
    ranks: u64,
}

impl BlockPlan {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks: ranks as u64 }
    }

    /// Offset of the ranks' [`Member`]s, behind the [`GroupHead`].
    pub(crate) fn members(self) -> u64 {
        size_of::<GroupHead>() as u64
    }

    /// Offset of the [`RoundHead`] of all ranks.
    pub(crate) fn round(self) -> u64 {
        self.members() + self.ranks * size_of::<Member>() as u64
    }

    /// Offset of the [`RoundHead`]s of transfers, of which each pair has one.
    fn pairs(self) -> u64 {
        self.round() + round_bytes(self.ranks)
    }

    /// Offset of the [`RoundHead`] of a pair's transfers.
    pub(crate) fn pair(self, pair: Pair) -> u64 {
        let index = pair.sender as u64 * self.ranks + pair.receiver as u64;
        self.pairs() + index * round_bytes(2)
    }

    pub(crate) fn bytes(self) -> u64 {
        self.pairs() + self.ranks * self.ranks * round_bytes(2)
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
            let last = plan.pair(Pair { sender: ranks - 1, receiver: ranks - 1 });
            assert_eq!(last + round_bytes(2), plan.bytes());
            for offset in [plan.members(), plan.round(), plan.pairs(), last] {
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
