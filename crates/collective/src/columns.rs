//! The elements of all ranks of one machine, reduced where they lie.

use std::ops::Range;

use fusestep_simd::{Level, streaming};
use fusestep_tensor::DType;
use smallvec::SmallVec;

use crate::rank_order::{Ranks, Slices, reduce_in_rank_order};
use crate::{Operation, ReduceOp};

/// Results of fewer bytes may still be in a cache when they are read.
const CACHED_BYTES: usize = 1 << 20;

/// Bytes of a result that are in the nearest cache before they go past the others.
const BLOCK_BYTES: usize = 4096;

/// Which ranks get the result of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receivers {
    /// All ranks.
    All,
    /// One rank.
    Rank(usize),
    /// The owner of each part gets the result of that part.
    Owner,
}

impl Receivers {
    /// The receivers of an operation that reduces.
    pub fn of_operation(operation: Operation) -> Self {
        match operation {
            Operation::Reduce { root, .. } => Self::Rank(root),
            Operation::ReduceScatter(_) => Self::Owner,
            _ => Self::All,
        }
    }

    /// The ranks that get the result of the part of `owner`.
    pub fn of_part(self, owner: usize, world_size: usize) -> Range<usize> {
        match self {
            Self::All => 0..world_size,
            Self::Rank(rank) => rank..rank + 1,
            Self::Owner => owner..owner + 1,
        }
    }
}

/// Elements of one rank that are reduced, where they lie.
#[derive(Debug)]
pub struct Column<'a> {
    /// The input, if it lies elsewhere than the result goes.
    pub shared: Option<&'a [u8]>,
    /// The place of the result, if this rank gets it; also the input, if `shared` is `None`.
    pub writable: &'a mut [u8],
}

/// Elements of all ranks that are reduced.
#[derive(Debug)]
pub struct Columns<'a, 'c> {
    /// The column of each rank.
    pub columns: &'a mut [Column<'c>],
    /// The ranks that get the result.
    pub receivers: Range<usize>,
    /// [`Ranks::share_bytes`].
    pub share_bytes: usize,
}

impl Columns<'_, '_> {
    /// Reduces the first `len_bytes` bytes of every column, as [`reduce_in_rank_order`].
    ///
    /// # Cost
    /// A long result for one rank goes past the caches, if all inputs lie elsewhere. Its memory is
    /// then written without being read first.
    pub fn reduce(&mut self, level: Level, dtype: DType, op: ReduceOp, len_bytes: usize) {
        let lie_elsewhere = self.columns.iter().all(|column| column.shared.is_some());
        if self.receivers.len() != 1 || self.share_bytes < CACHED_BYTES || !lie_elsewhere {
            return reduce_in_rank_order(level, dtype, op, len_bytes, self);
        }
        let (receiver, share_bytes) = (self.receivers.start, self.share_bytes);
        let mut block = [0; BLOCK_BYTES];
        streaming(level, |copies| {
            for start in (0..len_bytes).step_by(BLOCK_BYTES) {
                let bytes = start..len_bytes.min(start + BLOCK_BYTES);
                let shared = self.columns.iter().filter_map(|column| column.shared);
                let inputs: SmallVec<[_; 16]> = shared.map(|all| &all[bytes.clone()]).collect();
                let mut slices =
                    Slices { inputs: &inputs, out: &mut block[..bytes.len()], share_bytes };
                reduce_in_rank_order(level, dtype, op, bytes.len(), &mut slices);
                let out = &mut self.columns[receiver].writable[bytes.clone()];
                copies.copy(out, &block[..bytes.len()]);
            }
        });
    }
}

impl Ranks for Columns<'_, '_> {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.columns.len()
    }

    #[inline(always)]
    fn share_bytes(&self) -> usize {
        self.share_bytes
    }

    #[inline(always)]
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        let column = &self.columns[rank];
        match column.shared {
            None => &column.writable[bytes],
            Some(shared) => &shared[bytes],
        }
    }

    #[inline(always)]
    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        for column in &mut self.columns[self.receivers.clone()] {
            column.writable[bytes.clone()].copy_from_slice(result);
        }
    }

    #[inline(always)]
    fn pair(&mut self, bytes: Range<usize>) -> Option<([&mut [u8]; 2], Range<usize>)> {
        match &mut *self.columns {
            [x, y] if x.shared.is_none() && y.shared.is_none() => {
                let both = [&mut x.writable[bytes.clone()], &mut y.writable[bytes]];
                Some((both, self.receivers.clone()))
            }
            _ => None,
        }
    }
}
