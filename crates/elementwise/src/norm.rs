//! Sums of squares in a tree fixed by element index.
//!
//! ```text
//! leaf    1,024 consecutive elements of a tensor, counted from its start:
//!         lane j of 64 adds the squares of elements j, j + 64, …
//!         in order; then the lanes fold by halves, lane j += lane j + h for h = 32, 16, 8, 4, 2, 1
//! chunk   65,536 elements: 64 leaves, folded in the same way; a missing leaf is 0
//! tensor  its chunks in groups of 32 neighbours, folded in the same way, groups of groups likewise
//! total   its tensors in plan order, added up as chunks are
//! ```
//!
//! Squares of f32 and narrower types are exact in f64. The tree depends on neither threads, blocks,
//! launches nor buffers, so the sum has the same bits everywhere; `kernels/amp.cu` is the same
//! tree.

use fusestep_launch::{SquareSum, tree_sum};
use fusestep_simd::{Level, prefetch_ahead};

use crate::{Compute, Storage};

/// Lanes of a leaf, and leaves of a chunk.
pub const NORM_LANES: usize = 64;

/// Elements of a leaf.
pub const LEAF_ELEMENTS: usize = 1024;

/// Elements of a chunk, whose sum is one value: what one thread or block computes.
pub const NORM_CHUNK_ELEMENTS: usize = LEAF_ELEMENTS * NORM_LANES;

/// Lanes that are summed side by side: half of them where 64 accumulators of f64 do not fit the
/// registers. AVX-512 has room for all, and reads line after line then: 37 GB/s for 24 of a list in
/// memory on one core of a Zen 5.
pub(crate) const FEW_LANES: usize = NORM_LANES / 2;

/// The sum over one chunk, which starts at a multiple of [`NORM_CHUNK_ELEMENTS`] of its tensor.
///
/// # Panics
/// If there are more elements than a chunk has.
/// # Cost
/// One read of the elements.
pub fn chunk_square_sum<C, P>(level: Level, chunk: &[P]) -> SquareSum
where
    C: Compute,
    P: Storage<C>,
{
    assert!(
        chunk.len() <= NORM_CHUNK_ELEMENTS,
        "a chunk has at most {NORM_CHUNK_ELEMENTS} elements, this one has {}",
        chunk.len()
    );
    level.run_in_registers(
        #[inline(always)]
        || leaf_sums::<C, P, NORM_LANES>(chunk),
        #[inline(always)]
        || leaf_sums::<C, P, FEW_LANES>(chunk),
    )
}

#[inline(always)]
fn leaf_sums<C: Compute, P: Storage<C>, const SIDE: usize>(chunk: &[P]) -> SquareSum {
    let mut leaves = [0.0; NORM_LANES];
    let mut non_finite = 0;
    for (index, elements) in chunk.chunks(LEAF_ELEMENTS).enumerate() {
        let mut padded;
        let leaf: &[P; LEAF_ELEMENTS] = match elements.try_into() {
            Ok(leaf) => leaf,
            // Adding 0 to a sum of squares changes no bit, so a leaf that ends early is one that
            // goes on with zeros.
            Err(_) => {
                padded = [P::zeroed(); LEAF_ELEMENTS];
                padded[..elements.len()].copy_from_slice(elements);
                &padded
            }
        };
        let next = (index + 1) * LEAF_ELEMENTS;
        let ahead = |at: usize| prefetch_part_of_row::<P, SIDE>(chunk, next + at);
        let sum = sum_leaf::<SIDE>(|at| leaf[at].widen().exact(), ahead);
        leaves[index] = sum;
        non_finite += count_if_needed::<C, P>(sum, elements);
    }
    SquareSum { sum: fold(leaves), non_finite }
}

/// The sum over a whole tensor: its chunks as [`tree_sum`] adds them, in the calling thread.
///
/// # Cost
/// One read of the elements.
pub fn square_sum<C, P>(level: Level, tensor: &[P]) -> SquareSum
where
    C: Compute,
    P: Storage<C>,
{
    tree_sum(tensor.len().div_ceil(NORM_CHUNK_ELEMENTS), |chunk| {
        let first = chunk * NORM_CHUNK_ELEMENTS;
        let end = tensor.len().min(first + NORM_CHUNK_ELEMENTS);
        chunk_square_sum::<C, P>(level, &tensor[first..end])
    })
}

/// Folds by halves: value j += value j + h for h = 32, 16, 8, 4, 2, 1; the result is value 0.
#[inline(always)]
pub fn fold(mut values: [f64; NORM_LANES]) -> f64 {
    let mut half = NORM_LANES / 2;
    while half > 0 {
        let (low, high) = values.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    values[0]
}

/// Asks for the lines of as many elements as [`sum_leaf`] reads at a time.
#[inline(always)]
pub(crate) fn prefetch_part_of_row<P, const SIDE: usize>(list: &[P], first: usize) {
    for line in 0..(SIDE * size_of::<P>()).div_ceil(64) {
        // Not reached for elements without bytes, which divide by 0.
        prefetch_ahead(list, first + line * 64 / size_of::<P>());
    }
}

/// The sum of squares of a leaf's values; `ahead` is called with the first element of a part of a
/// row before its values.
#[expect(
    clippy::needless_range_loop,
    reason = "over an iterator the running sums leave their registers, which takes four times as \
              long"
)]
#[inline(always)]
pub(crate) fn sum_leaf<const SIDE: usize>(
    value: impl Fn(usize) -> f64,
    ahead: impl Fn(usize),
) -> f64 {
    let mut lanes = [0.0f64; NORM_LANES];
    for column in 0..NORM_LANES / SIDE {
        let mut sums = [0.0f64; SIDE];
        for row in 0..LEAF_ELEMENTS / NORM_LANES {
            let at = row * NORM_LANES + column * SIDE;
            ahead(at);
            for lane in 0..SIDE {
                let x = value(at + lane);
                sums[lane] += x * x;
            }
        }
        lanes[column * SIDE..][..SIDE].copy_from_slice(&sums);
    }
    fold(lanes)
}

/// A finite sum has no infinite or NaN element. Any other is looked through once more, element by
/// element: the squares of f64 may overflow where no element is infinite.
#[inline(always)]
fn count_if_needed<C, P>(sum: f64, elements: &[P]) -> u64
where
    C: Compute,
    P: Storage<C>,
{
    if sum.is_finite() {
        return 0;
    }
    let finite = |x: &&P| -> bool {
        let x = x.widen().exact();
        x.is_finite()
    };
    (elements.len() - elements.iter().filter(finite).count()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The module's equation, element by element.
    fn naive(tensor: &[f32]) -> f64 {
        let mut chunks = vec![];
        for chunk in tensor.chunks(65_536) {
            let mut leaves = vec![0.0f64; 64];
            for (leaf, elements) in chunk.chunks(1024).enumerate() {
                let mut lanes = vec![0.0f64; 64];
                for (index, &x) in elements.iter().enumerate() {
                    lanes[index % 64] += f64::from(x) * f64::from(x);
                }
                leaves[leaf] = halve(lanes);
            }
            chunks.push(halve(leaves));
        }
        // No test here has more than 32.
        chunks.resize(64, 0.0);
        halve(chunks)
    }

    fn halve(mut values: Vec<f64>) -> f64 {
        for h in [32, 16, 8, 4, 2, 1] {
            for j in 0..h {
                values[j] += values[j + h];
            }
        }
        values[0]
    }

    fn values(numel: usize) -> Vec<f32> {
        let mut seed = 12_345u32;
        let next = |_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(seed) / 4e9 - 0.5) as f32 * (1 << (seed % 23)) as f32
        };
        (0..numel).map(next).collect()
    }

    #[test]
    fn every_level_sums_in_the_fixed_tree() {
        for numel in [0, 1, 63, 64, 65, 1023, 1024, 1025, 5000, 65_535, 65_536, 65_537, 200_001] {
            let values = values(numel);
            for level in Level::available() {
                let found = square_sum::<f32, f32>(level, &values);
                assert_eq!(found.sum.to_bits(), naive(&values).to_bits(), "{numel}, {level}");
                assert_eq!(found.non_finite, 0);
            }
        }
    }

    #[test]
    fn the_tree_is_no_plain_sum() {
        // If the order did not matter, the test above would pin nothing.
        let values = values(200_001);
        let plain: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let found = square_sum::<f32, f32>(Level::detect(), &values).sum;
        assert!(plain != found && (plain / found - 1.0).abs() < 1e-12);
    }

    #[test]
    fn infinite_and_nan_elements_are_counted_wherever_they_stand() {
        for numel in [1, 70, 1024, 65_537] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, numel / 2, numel - 1] {
                    let mut values = values(numel);
                    values[at] = bad;
                    let found = square_sum::<f32, f32>(Level::detect(), &values);
                    assert_eq!(found.non_finite, 1, "{bad} at {at} of {numel}");
                    assert!(!found.sum.is_finite());
                }
            }
        }
    }

    #[test]
    fn squares_that_overflow_f64_are_not_counted() {
        let found = square_sum::<f64, f64>(Level::detect(), &[1e200, 3.0, f64::NAN]);
        assert_eq!(found.non_finite, 1);
        let found = square_sum::<f64, f64>(Level::detect(), &[1e200, 3.0]);
        assert_eq!(found, SquareSum { sum: f64::INFINITY, non_finite: 0 });
        let largest = square_sum::<f32, f32>(Level::detect(), &[f32::MAX; 2000]);
        assert!(largest.sum.is_finite() && largest.non_finite == 0);
    }
}
