//! Contributions of parties to a round: their checks, and the addresses kept of them meanwhile.

use std::ops::Range;

/// Header and memory that one party brings to a round.
#[derive(Debug)]
pub(crate) struct Contribution<'a, H> {
    /// A value that every party may read.
    pub(crate) header: H,
    /// Bytes that every party may read.
    pub(crate) shared: &'a [u8],
    /// Bytes cut into one part for each party. A party that has claimed bytes of a part reads and
    /// writes them alone.
    pub(crate) writable: &'a mut [u8],
    /// End of each part of `writable`; a part begins where the part before ends.
    pub(crate) ends: &'a [usize],
    /// Bytes that are claimed for this party from the start, of the part with its number
    /// ([`Peers::reserved`](super::Peers::reserved)).
    pub(crate) reserved: usize,
    /// More memory that is cut into a part for each party; part `i` is party `i`'s alone.
    pub(crate) replicas: [&'a mut [u8]; MAX_REPLICAS],
    /// End of each part of each replica: all ends of the first replica, then all of the next. A
    /// replica without ends is not brought.
    pub(crate) replica_ends: &'a [usize],
}

/// The most replicas that a party brings.
pub(crate) const MAX_REPLICAS: usize = 7;

/// Addresses of a contribution, without lifetimes, kept while others use it.
pub(super) struct Brought<H> {
    pub(super) header: Option<H>,
    pub(super) shared: *const u8,
    pub(super) shared_len: usize,
    pub(super) writable: *mut u8,
    /// Disjoint ranges within `writable`; checked by `cuts`.
    pub(super) parts: Box<[Range<usize>]>,
    /// The parts of each replica, as many for each as there are parties; disjoint, checked by
    /// `cuts`.
    pub(super) replicas: Vec<Part>,
}

/// A part of a replica.
pub(super) struct Part {
    pub(super) start: *mut u8,
    pub(super) len: usize,
}

impl<H> Brought<H> {
    /// An empty contribution, before the first round of `parties` parties.
    pub(super) fn nothing(parties: usize) -> Self {
        Self {
            header: None,
            shared: std::ptr::null(),
            shared_len: 0,
            writable: std::ptr::null_mut(),
            parts: vec![0..0; parties].into_boxed_slice(),
            replicas: Vec::new(),
        }
    }
}

/// Whether the ends of replicas cut each of them into `parties` parts.
pub(super) fn cuts_replicas<H>(contribution: &Contribution<'_, H>, parties: usize) -> bool {
    let ends = contribution.replica_ends.chunks_exact(parties);
    let mut pairs = contribution.replicas.iter().zip(ends.clone());
    ends.remainder().is_empty()
        && ends.len() <= MAX_REPLICAS
        && pairs.all(|(bytes, ends)| cuts(ends, bytes.len(), parties))
}

/// Whether `ends` cuts `len` bytes into `parties` parts.
pub(super) fn cuts(ends: &[usize], len: usize, parties: usize) -> bool {
    ends.len() == parties && ends.is_sorted() && ends.last().is_none_or(|&last| last == len)
}

/// Writes a contribution, whose ends were checked by `cuts`, into the party's place. Only lifetimes
/// get lost here.
pub(super) fn bring<H>(brought: &mut Brought<H>, contribution: Contribution<'_, H>) {
    brought.header = Some(contribution.header);
    brought.shared = contribution.shared.as_ptr();
    brought.shared_len = contribution.shared.len();
    brought.writable = contribution.writable.as_mut_ptr();
    let mut start = 0;
    for (part, &end) in brought.parts.iter_mut().zip(contribution.ends) {
        *part = start..end;
        start = end;
    }
    brought.replicas.clear();
    let ends = contribution.replica_ends.chunks_exact(brought.parts.len());
    for (mut rest, ends) in contribution.replicas.into_iter().zip(ends) {
        let mut start = 0;
        for &end in ends {
            let (part, behind) = rest.split_at_mut(end - start);
            brought.replicas.push(Part { start: part.as_mut_ptr(), len: part.len() });
            (rest, start) = (behind, end);
        }
    }
}
