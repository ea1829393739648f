//! Pairs: the two ranks of a transfer.

/// The two ranks of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// The rank that sends.
    pub sender: usize,
    /// The rank that receives.
    pub receiver: usize,
}

impl Pair {
    /// Both ranks, the sender first.
    pub const fn ranks(self) -> [usize; 2] {
        [self.sender, self.receiver]
    }

    /// The place of one of the two among [`ranks`](Self::ranks).
    pub const fn side(self, rank: usize) -> usize {
        (rank == self.receiver) as usize
    }

    /// The rank on the other side of `rank`.
    pub const fn peer(self, rank: usize) -> usize {
        self.ranks()[1 - self.side(rank)]
    }

    /// Whether `rank` is one of the two.
    pub const fn has(self, rank: usize) -> bool {
        self.sender == rank || self.receiver == rank
    }
}
