//! Blocks: the part of the whole that belongs to each rank.

use std::ops::Range;

use smallvec::SmallVec;

/// Each rank's slice, in rank order.
pub type OfRanks<T> = SmallVec<[T; 16]>;

/// The blocks of `numel` elements, one for each rank, in rank order and without gaps.
///
/// Without counts the blocks are as equal as can be: the first `numel mod world` ranks have one
/// element more.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Elements of the whole.
    pub numel: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Elements of each block, whose sum is `numel`; `None` for blocks as equal as can be.
    pub counts: Option<&'a [usize]>,
}

impl Blocks<'_> {
    /// Elements of block `rank`, counted from the beginning of the whole.
    pub fn of(&self, rank: usize) -> Range<usize> {
        match self.counts {
            Some(counts) => {
                let start: usize = counts[..rank].iter().sum();
                start..start + counts[rank]
            }
            None => self.even_start(rank)..self.even_start(rank + 1),
        }
    }

    /// Bytes of block `rank`, counted from the beginning of the whole, for elements of
    /// `element_bytes`.
    pub fn of_bytes(&self, rank: usize, element_bytes: usize) -> Range<usize> {
        let block = self.of(rank);
        block.start * element_bytes..block.end * element_bytes
    }

    /// Bytes of block `rank` of a list in which so many elements share an entry of `entry_bytes`.
    /// Blocks begin with an entry.
    pub fn of_entries(&self, rank: usize, elements: usize, entry_bytes: usize) -> Range<usize> {
        let block = self.of(rank);
        let [start, end] = [block.start, block.end].map(|at| at.div_ceil(elements.max(1)));
        start * entry_bytes..end * entry_bytes
    }

    /// [`of_bytes`](Self::of_bytes) of every rank.
    pub fn all_bytes(&self, element_bytes: usize) -> OfRanks<Range<usize>> {
        (0..self.world_size).map(|rank| self.of_bytes(rank, element_bytes)).collect()
    }

    fn even_start(&self, rank: usize) -> usize {
        let (each, more) = (self.numel / self.world_size, self.numel % self.world_size);
        rank * each + rank.min(more)
    }
}

/// Block lengths of `numel` elements as equal as can be, the longer ones first: the counts that
/// calls use when given none.
pub fn even_counts(numel: usize, world_size: usize) -> Vec<usize> {
    let blocks = Blocks { numel, world_size, counts: None };
    (0..world_size).map(|rank| blocks.of(rank).len()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_each_other_and_cover_the_whole() {
        for (numel, world) in [(0, 3), (1, 3), (2, 3), (3, 3), (10, 4), (7, 1), (5, 8)] {
            let counts = even_counts(numel, world);
            assert_eq!(counts.iter().sum::<usize>(), numel);
            assert!(counts.is_sorted_by(|a, b| a >= b) && counts[0] - counts[world - 1] <= 1);
            for counts in [None, Some(&counts[..])] {
                let blocks = Blocks { numel, world_size: world, counts };
                let mut end = 0;
                for rank in 0..world {
                    assert_eq!(blocks.of(rank).start, end);
                    end = blocks.of(rank).end;
                }
                assert_eq!(end, numel);
            }
        }
        let uneven = Blocks { numel: 5, world_size: 3, counts: Some(&[0, 4, 1]) };
        assert_eq!(uneven.of_bytes(1, 4), 0..16);
    }
}
