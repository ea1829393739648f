//! How far elements move: squares of new − old, added up while both are in registers.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Zeroable;
use fusestep_launch::{CHUNK_UNITS, LeafSums, UnitSums};

use crate::Compute;
use crate::norm::{LEAF_ELEMENTS as LEAF, NORM_LANES, fold};
use crate::param_storage::ParamStorage;
use crate::rounding::Rounding;
use crate::run::{LANES, Tensor, Update};
use crate::storage::Storage;

/// What becomes of the changes of a block.
pub(crate) trait Changes<C: Compute> {
    /// Whether they are asked for.
    const ASKED: bool;

    /// Takes those of `count` elements from `first` of the leaf on.
    fn add(&mut self, first: usize, count: usize, old: &[C; LANES], new: &[C; LANES]);

    /// Takes those of half of the `2 · LANES` elements from `first` on: 0 for those at even places,
    /// 1 for those at odd ones.
    fn add_half(&mut self, first: usize, half: usize, old: &[C; LANES], new: &[C; LANES]);
}

/// Nobody asks.
pub(crate) struct Ignored;

impl<C: Compute> Changes<C> for Ignored {
    const ASKED: bool = false;

    #[inline(always)]
    fn add(&mut self, _: usize, _: usize, _: &[C; LANES], _: &[C; LANES]) {}

    #[inline(always)]
    fn add_half(&mut self, _: usize, _: usize, _: &[C; LANES], _: &[C; LANES]) {}
}

/// The squares of a leaf, added up in its lanes.
///
/// They stay in memory: 64 of f64 beside those of an update are more than any instruction set has
/// registers for, and the nearest cache gives them back before the next row needs them.
struct Squares {
    lanes: [f64; NORM_LANES],
    /// Lanes of which blocks of pairs are the first to add: of two blocks in a row, the even and
    /// the odd ones.
    pairs: [[[f64; LANES]; 2]; 2],
}

impl Squares {
    #[inline(always)]
    fn new() -> Self {
        Self {
            lanes: [0.0; NORM_LANES],
            pairs: [[[0.0; LANES]; 2]; 2],
        }
    }

    /// Puts the sums over pairs where those that follow are added; before these, every lane is 0.
    #[inline(always)]
    fn unpair(&mut self) {
        for (block, halves) in self.pairs.iter().enumerate() {
            for (half, sums) in halves.iter().enumerate() {
                for (pair, sum) in sums.iter().enumerate() {
                    self.lanes[block * 2 * LANES + 2 * pair + half] = *sum;
                }
            }
        }
    }
}

#[inline(always)]
fn add_squares<C: Compute>(sums: &mut [f64; LANES], old: &[C; LANES], new: &[C; LANES]) {
    for lane in 0..LANES {
        let change = new[lane].exact() - old[lane].exact();
        sums[lane] += change * change;
    }
}

impl<C: Compute> Changes<C> for Squares {
    const ASKED: bool = true;

    #[inline(always)]
    fn add(&mut self, first: usize, count: usize, old: &[C; LANES], new: &[C; LANES]) {
        let row = &mut self.lanes[first % NORM_LANES..];
        match row.first_chunk_mut() {
            Some(row) if count == LANES => add_squares(row, old, new),
            _ => {
                for (lane, sum) in row[..count].iter_mut().enumerate() {
                    let change = new[lane].exact() - old[lane].exact();
                    *sum += change * change;
                }
            }
        }
    }

    #[inline(always)]
    fn add_half(&mut self, first: usize, half: usize, old: &[C; LANES], new: &[C; LANES]) {
        add_squares(&mut self.pairs[first / (2 * LANES) % 2][half], old, new);
    }
}

impl<C, K, S, R, const N: usize> Tensor<'_, C, K, S, R, N>
where
    C: Compute,
    K: ParamStorage<C>,
    S: Storage<C>,
    R: Rounding,
{
    /// Updates whole leaves from a chunk's start on, the last one perhaps shorter, and leaves in
    /// `leaves` Σ (new − old)² over each.
    #[inline(always)]
    pub(crate) fn update_measured<U: Update<C, N>>(
        &mut self,
        update: U,
        set: U::Set,
        leaves: &[AtomicU64],
    ) {
        let numel = self.param.len();
        for (leaf, sum) in leaves[..numel.div_ceil(LEAF)].iter().enumerate() {
            let elements = leaf * LEAF..numel.min((leaf + 1) * LEAF);
            let change = self.update_leaf(update, set, elements.start, elements.end);
            sum.store(change.to_bits(), Ordering::Relaxed);
        }
    }

    /// Updates the elements `first..end`, at most a leaf; returns Σ (new − old)² over them.
    #[inline(always)]
    fn update_leaf<U: Update<C, N>>(
        &mut self,
        update: U,
        set: U::Set,
        mut first: usize,
        end: usize,
    ) -> f64 {
        let mut squares = Squares::new();
        if Self::PAIRED {
            let start = first;
            let mut old = [K::Param::zeroed(); LEAF];
            old[..end - start].copy_from_slice(&self.param[start..end]);
            // As in `update`: a factor of 1 changes no bit.
            first = if self.grad_factor == C::ONE {
                self.update_leaf_pairs::<U, false>(update, set, start, end)
            } else {
                self.update_leaf_pairs::<U, true>(update, set, start, end)
            };
            self.measure_pairs(&old, start, first, &mut squares);
            squares.unpair();
        }
        while first + LANES <= end {
            self.prefetch(first);
            let block = self.block(update, set, first, LANES, &mut squares);
            self.store(&block, first, LANES);
            first += LANES;
        }
        if first < end {
            let block = self.block(update, set, first, end - first, &mut squares);
            self.store(&block, first, end - first);
        }
        fold(squares.lanes)
    }

    /// Updates as many of the elements `first..end` as there are blocks of pairs; returns where
    /// they end.
    #[inline(always)]
    fn update_leaf_pairs<U: Update<C, N>, const SCALED: bool>(
        &mut self,
        update: U,
        set: U::Set,
        mut first: usize,
        end: usize,
    ) -> usize {
        while first + 2 * LANES <= end {
            self.prefetch(first);
            self.update_pairs::<U, SCALED>(update, set, first);
            first += 2 * LANES;
        }
        first
    }
}

/// The leaves of a chunk, folded by 32, 16 and 8.
pub(crate) fn units(leaves: &LeafSums) -> UnitSums {
    const UNITS: usize = CHUNK_UNITS as usize;
    let mut sums: [f64; NORM_LANES] =
        std::array::from_fn(|leaf| f64::from_bits(leaves[leaf].load(Ordering::Relaxed)));
    let mut half = NORM_LANES / 2;
    while half >= UNITS {
        let (low, high) = sums.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    std::array::from_fn(|unit| sums[unit])
}
