//! Sums in one binary tree: of four and more ranks, or of what ranks bring of it.

use std::ops::Range;

use fusestep_simd::{Level, prefetch_ahead};
use smallvec::SmallVec;

use super::number::{Arithmetic, LANES, Number};
use super::{BURST_BYTES, LINE_BYTES, Ranks, narrow, wide};
use crate::{Divisor, OfRanks, ReduceOp};

/// Most sums that are held at a time, of as many ranks as a usize counts.
const DEPTH: usize = usize::BITS as usize;

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
    len_bytes: usize,
    ranks: &mut dyn Ranks,
    ahead: usize,
) {
    let world_size = ranks.world_size();
    let mut held = [[T::Wide::default(); LANES]; DEPTH];
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
                    reduce_burst::<T>(divisor, merges, &inputs, &mut held, result);
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
    held: &mut [[T::Wide; LANES]; DEPTH],
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
    held: &mut [[T::Wide; LANES]; DEPTH],
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
