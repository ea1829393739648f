//! Sums in one binary tree: of four and more ranks, or of what ranks bring of it.

use std::ops::Range;

use bytemuck::Pod;
use fusestep_simd::{Level, prefetch_ahead};
use smallvec::SmallVec;

use super::number::{Arithmetic, LANES, Number};
use super::{BURST_BYTES, LINE_BYTES, Ranks, ahead_of, narrow, wide};
use crate::{Divisor, OfRanks, ReduceOp};

/// Most sums that are held at a time, of as many ranks as a usize counts.
const DEPTH: usize = usize::BITS as usize;

/// Sums that wait for their right neighbours: memory that callers for few bytes at a time keep
/// between calls, since clearing it would take longer than the sums.
#[derive(Debug)]
pub struct WaitingSums([[f64; LANES]; DEPTH]);

impl Default for WaitingSums {
    fn default() -> Self {
        Self([[0.0; LANES]; DEPTH])
    }
}

impl WaitingSums {
    fn of<W: Pod>(&mut self) -> &mut [[W; LANES]] {
        let all: &mut [W] = bytemuck::cast_slice_mut(self.0.as_flattened_mut());
        all.as_chunks_mut().0
    }
}

/// Numbers of sums that each rank's is added to before the next one comes, for one of each rank: a
/// binary counter, which adds two sums of as many ranks as soon as it has them, and what is left
/// from the last to the first.
pub(super) fn merges(world_size: usize) -> SmallVec<[usize; 16]> {
    let last = world_size - 1;
    let within = (0..last).map(|rank| (rank + 1).trailing_zeros() as usize);
    within.chain([last.count_ones() as usize]).collect()
}

/// Reduces all bytes, burst by burst. Ranks are looked up once for each burst, so that one loop
/// for each type and level serves all kinds of ranks. `merges` has an entry for each of them.
pub(super) fn reduce<T: Number>(
    level: Level,
    divisor: Divisor,
    merges: &[usize],
    waiting: &mut WaitingSums,
    len_bytes: usize,
    ranks: &mut dyn Ranks,
) {
    let ahead = ahead_of::<T>(ranks);
    let world_size = ranks.world_size();
    let held = waiting.of::<T::Wide>();
    let mut result = [0; BURST_BYTES];
    for start in (0..len_bytes).step_by(BURST_BYTES) {
        let burst = start..len_bytes.min(start + BURST_BYTES);
        let result = &mut result[..burst.len()];
        {
            let inputs: OfRanks<&[u8]> =
                (0..world_size).map(|rank| ranks.input(rank, burst.clone())).collect();
            level.run(
                #[inline(always)]
                || {
                    if ahead > 0 {
                        ask_ahead(&inputs, ahead);
                    }
                    reduce_burst::<T>(divisor, merges, &inputs, held, result);
                },
            );
        }
        ranks.store(burst, result);
    }
}

#[inline(always)]
fn ask_ahead(inputs: &[&[u8]], ahead: usize) {
    for input in inputs {
        for line in (0..BURST_BYTES).step_by(LINE_BYTES) {
            prefetch_ahead(input, ahead + line);
        }
    }
}

#[inline(always)]
fn reduce_burst<T: Number>(
    divisor: Divisor,
    merges: &[usize],
    inputs: &[&[u8]],
    held: &mut [[T::Wide; LANES]],
    result: &mut [u8],
) {
    let line_bytes = LANES * size_of::<T>();
    for start in (0..result.len()).step_by(line_bytes) {
        let line = start..result.len().min(start + line_bytes);
        let sum = sum_line::<T>(merges, inputs, line.clone(), held);
        let sum = narrow::<T>(ReduceOp::Tree(divisor), inputs.len(), sum);
        let sum = bytemuck::bytes_of(&sum);
        if line.len() == line_bytes {
            result[line].copy_from_slice(sum);
        } else {
            let len = line.len();
            result[line].copy_from_slice(&sum[..len]);
        }
    }
}

/// The sum of all ranks' elements of a line.
#[inline(always)]
fn sum_line<T: Number>(
    merges: &[usize],
    inputs: &[&[u8]],
    line: Range<usize>,
    held: &mut [[T::Wide; LANES]],
) -> [T::Wide; LANES] {
    let mut depth = 0;
    let mut sum = [T::Wide::default(); LANES];
    for (at, (input, &merges)) in inputs.iter().zip(merges).enumerate() {
        if at > 0 {
            held[depth] = sum;
            depth += 1;
        }
        sum = wide::<T>(&input[line.clone()]);
        for _ in 0..merges {
            depth -= 1;
            add_to(&held[depth], &mut sum);
        }
    }
    sum
}

#[inline(always)]
fn add_to<W: Arithmetic>(left: &[W; LANES], sum: &mut [W; LANES]) {
    for lane in 0..LANES {
        sum[lane] = left[lane].plus(sum[lane]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank_order::{Slices, TreeOrder, reduce_along_tree, reduce_slices};
    use fusestep_tensor::DType;

    /// The sum of leaves by the definition.
    fn tree(leaves: &[f32]) -> f32 {
        match leaves {
            [leaf] => *leaf,
            _ => {
                let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
                tree(left) + tree(right)
            }
        }
    }

    /// Leaves of so many ranks, whose sums do not come out alike in another order.
    fn leaves(count: usize, numel: usize) -> Vec<Vec<f32>> {
        let mut seed = 7u32;
        let mut draw = |_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 * 2f32.powi((seed % 23) as i32 - 30)
        };
        (0..count).map(|_| (0..numel).map(&mut draw).collect()).collect()
    }

    fn along(inputs: &[&[f32]], merges: &[usize], divisor: f64) -> Vec<f32> {
        let mut out = vec![0.0f32; inputs[0].len()];
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        let len_bytes = bytes.len();
        let order = TreeOrder { divisor: Divisor::of(divisor), merges };
        for level in Level::available() {
            let mut sums = Slices { inputs: &inputs, share_bytes: len_bytes, out: &mut *bytes };
            let mut waiting = WaitingSums::default();
            reduce_along_tree(level, DType::F32, order, &mut waiting, len_bytes, &mut sums);
        }
        out
    }

    #[test]
    fn one_sum_of_each_rank_is_the_tree_over_ranks() {
        for count in [1, 2, 3, 4, 5, 6, 7, 8, 12, 33] {
            let all = leaves(count, 300);
            let inputs: Vec<&[f32]> = all.iter().map(Vec::as_slice).collect();
            let expected: Vec<f32> = (0..300)
                .map(|at| tree(&all.iter().map(|leaf| leaf[at]).collect::<Vec<_>>()) / 3.0)
                .collect();
            assert!(along(&inputs, &merges(count), 3.0) == expected, "{count}");
            let bytes: Vec<&[u8]> = all.iter().map(|leaf| bytemuck::cast_slice(leaf)).collect();
            let mut out = vec![0; 1200];
            let op = ReduceOp::Tree(Divisor::of(3.0));
            reduce_slices(Level::detect(), DType::F32, op, &bytes, &mut out);
            assert!(out == bytemuck::cast_slice::<f32, u8>(&expected), "{count}");
        }
    }

    #[test]
    fn sums_that_some_ranks_have_formed_leave_the_bits_of_all_leaves() {
        // Of 12 leaves three ranks bring 0 to 4, 4, and 5; 6 and 7; and 8 to 12.
        let all = leaves(12, 65);
        let sum = |leaves: std::ops::Range<usize>| -> Vec<f32> {
            let of = |at: usize| leaves.clone().map(|leaf| all[leaf][at]).collect::<Vec<_>>();
            (0..65).map(|at| tree(&of(at))).collect()
        };
        let sums = [sum(0..4), sum(4..5), sum(5..6), sum(6..8), sum(8..12)];
        let inputs: Vec<&[f32]> = sums.iter().map(Vec::as_slice).collect();
        assert!(along(&inputs, &[0, 0, 1, 2, 1], 1.0) == sum(0..12));
        assert!(along(&inputs, &[0, 1, 1, 1, 1], 1.0) != sum(0..12));
    }
}
