//! Split of a dimension into one block for each rank.

use std::ops::Range;
use std::sync::Arc;

use fusestep_collective::{Blocks, even_counts};

use super::{Group, ParallelError};

/// Split of a dimension into one block for each rank, in rank order and without gaps. Blocks may be
/// of any length, 0 included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    counts: Arc<[usize]>,
}

impl Split {
    /// Cuts `total` elements as equally as can be; the first ranks have one more if the rest is not
    /// 0.
    pub fn even(total: usize, group: &Group) -> Self {
        Self { counts: even_counts(total, group.world_size()).into() }
    }

    /// Makes a split with a block of `counts[i]` elements for rank `i`.
    ///
    /// ```
    /// use fusestep_candle::parallel::Split;
    ///
    /// let split = Split::from_counts([1024, 512]);
    /// assert_eq!((split.total(), split.range(1)), (1536, 1024..1536));
    /// ```
    pub fn from_counts(counts: impl Into<Vec<usize>>) -> Self {
        Self { counts: counts.into().into() }
    }

    /// The length of each rank's block.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The length of the whole.
    pub fn total(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The block of `rank` within the whole.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn range(&self, rank: usize) -> Range<usize> {
        let blocks = Blocks {
            numel: self.total(),
            world_size: self.counts.len(),
            counts: Some(&self.counts),
        };
        blocks.of(rank)
    }

    /// Refuses a split for another number of ranks.
    pub(super) fn check(&self, group: &Group) -> Result<(), ParallelError> {
        if self.counts.len() == group.world_size() {
            return Ok(());
        }
        Err(ParallelError::World {
            expected: group.world_size(),
            found: self.counts.len(),
            counts: self.counts.to_vec(),
        })
    }
}
