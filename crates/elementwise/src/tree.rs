//! Sums of squares in a tree fixed by element index.
//!
//! A **leaf** is 1,024 elements of a tensor, counted from its own start: lane j of 64 sums the squares of elements j, j + 64, … in
//! order, then the lanes fold by halves (lane j += lane j + h for h = 32, 16, 8, 4, 2, 1). A **chunk** is 65,536 elements: 64
//! leaves, folded alike, where missing leaves are 0. A tensor's sum is that of its chunks, added in order from 0, and a total that of
//! its tensors. Squares of f32 are exact in f64; those of f64 are rounded once. So a sum depends on the tensor alone, never on
//! threads, vector width, launches or backend.

use fusestep_launch::CHUNK_ELEMENTS;
use fusestep_simd::{Level, prefetch_ahead};

use crate::{Compute, Storage};

/// Elements of a leaf.
const LEAF: usize = 1024;

/// Running sums of a leaf, and leaves of a chunk.
const LANES: usize = 64;

/// Lanes that are summed side by side: their sums stay in registers at every level.
const COLUMN: usize = 16;

const _: () = assert!(LEAF * LANES == CHUNK_ELEMENTS as usize);

/// What is squared and summed: `SUMS` values formed from one element of each of `LISTS` lists, in the compute type.
pub trait Terms<C: Compute, const LISTS: usize, const SUMS: usize>: Sync {
    /// The values of one element.
    fn terms(&self, element: [C; LISTS]) -> [C; SUMS];
}

/// The sums of squares over one chunk, given by its elements in each list.
///
/// # Shapes
/// At most 65,536 elements, the same number in all lists; fewer only in a tensor's last chunk, for the sums to be those of the tree.
/// # Cost
/// One read of the lists.
pub fn chunk_sums<C, T, K, const LISTS: usize, const SUMS: usize>(
    level: Level,
    terms: &K,
    lists: [&[T]; LISTS],
) -> [f64; SUMS]
where
    C: Compute,
    T: Storage<C>,
    K: Terms<C, LISTS, SUMS>,
{
    level.run(
        #[inline(always)]
        || {
            let numel = lists[0].len();
            let mut leaves = [[0.0; LANES]; SUMS];
            for leaf in 0..numel.div_ceil(LEAF) {
                let elements = leaf * LEAF..numel.min((leaf + 1) * LEAF);
                let of_leaf = leaf_sums(terms, lists.map(|list| &list[elements.clone()]));
                for (leaves, sum) in leaves.iter_mut().zip(of_leaf) {
                    leaves[leaf] = sum;
                }
            }
            leaves.map(fold)
        },
    )
}

/// The sums over one leaf.
///
/// The plain version walks the elements in order with 64 running sums for each term, more than there are registers. Columns of 16
/// lanes give the same sums and stay in registers; each visit asks for the same place one leaf ahead, so that every line of the
/// next leaf is asked for once.
#[inline(always)]
fn leaf_sums<C, T, K, const LISTS: usize, const SUMS: usize>(
    terms: &K,
    lists: [&[T]; LISTS],
) -> [f64; SUMS]
where
    C: Compute,
    T: Storage<C>,
    K: Terms<C, LISTS, SUMS>,
{
    let numel = lists[0].len();
    let rows = numel / LANES;
    let mut lanes = [[0.0; LANES]; SUMS];
    for column in 0..LANES / COLUMN {
        let mut sums = [[0.0; COLUMN]; SUMS];
        for row in 0..rows {
            let first = row * LANES + column * COLUMN;
            let blocks = lists.map(|list| block(list, first));
            for lane in 0..COLUMN {
                let values = terms.terms(blocks.map(|block| block[lane].widen()));
                for (sums, value) in sums.iter_mut().zip(values) {
                    let value = value.exact();
                    sums[lane] += value * value;
                }
            }
        }
        for (lanes, sums) in lanes.iter_mut().zip(sums) {
            lanes[column * COLUMN..][..COLUMN].copy_from_slice(&sums);
        }
    }
    for at in rows * LANES..numel {
        let values = terms.terms(lists.map(|list| list[at].widen()));
        for (lanes, value) in lanes.iter_mut().zip(values) {
            let value = value.exact();
            lanes[at - rows * LANES] += value * value;
        }
    }
    lanes.map(fold)
}

/// The elements of a column in one row; asks for those one leaf ahead.
#[inline(always)]
fn block<T: Copy>(list: &[T], first: usize) -> [T; COLUMN] {
    prefetch_ahead(list, first + LEAF);
    if size_of::<T>() == 8 {
        prefetch_ahead(list, first + LEAF + COLUMN / 2);
    }
    let block = &list[first..first + COLUMN];
    std::array::from_fn(|lane| block[lane])
}

/// Adds the upper half to the lower until one is left.
#[inline(always)]
fn fold(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Itself;

    impl<C: Compute> Terms<C, 1, 1> for Itself {
        fn terms(&self, element: [C; 1]) -> [C; 1] {
            element
        }
    }

    struct SumAndDifference;

    impl<C: Compute> Terms<C, 2, 2> for SumAndDifference {
        fn terms(&self, [a, b]: [C; 2]) -> [C; 2] {
            [a + b, a - b]
        }
    }

    /// The definition, word for word: pads a chunk with zeros and adds.
    fn transcription(values: &[f64]) -> f64 {
        let mut padded = values.to_vec();
        padded.resize(65_536, 0.0);
        let mut leaves = Vec::new();
        for leaf in padded.chunks(1024) {
            let mut lanes = vec![0.0; 64];
            for term in 0..16 {
                for (j, lane) in lanes.iter_mut().enumerate() {
                    let x = leaf[j + 64 * term];
                    *lane += x * x;
                }
            }
            leaves.push(halves(lanes));
        }
        halves(leaves)
    }

    fn halves(mut values: Vec<f64>) -> f64 {
        for h in [32, 16, 8, 4, 2, 1] {
            for j in 0..h {
                values[j] += values[j + h];
            }
        }
        values[0]
    }

    fn values(numel: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let exponent = (state >> 59) as i32 - 16;
            ((state >> 33) as f32 / 2e9 - 0.5) * 2f32.powi(exponent)
        };
        (0..numel).map(next).collect()
    }

    #[test]
    fn the_tree_is_the_naive_transcription_at_every_level_and_length() {
        for numel in [
            0, 1, 15, 16, 17, 63, 64, 65, 511, 513, 1023, 1024, 1025, 4095, 20_000, 65_535, 65_536,
        ] {
            let (a, b) = (values(numel, 3), values(numel, 4));
            let wide: Vec<f64> = a.iter().map(|&x| f64::from(x)).collect();
            let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a + b)).collect();
            let difference: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(a - b)).collect();
            for level in Level::available() {
                let [one] = chunk_sums::<f32, _, _, 1, 1>(level, &Itself, [&a]);
                let [double] = chunk_sums::<f64, _, _, 1, 1>(level, &Itself, [&wide]);
                let two = chunk_sums::<f32, _, _, 2, 2>(level, &SumAndDifference, [&a, &b]);
                let expected = transcription(&wide);
                assert_eq!((one, double), (expected, expected), "{level}, {numel}");
                assert_eq!(
                    two,
                    [transcription(&sum), transcription(&difference)],
                    "{level}, {numel}"
                );
            }
        }
    }

    #[test]
    fn another_order_gives_other_bits() {
        let wide: Vec<f64> = values(65_536, 5).into_iter().map(f64::from).collect();
        let in_order = wide.iter().fold(0.0, |sum, x| sum + x * x);
        assert_ne!(transcription(&wide), in_order);
    }

    #[test]
    fn one_value_that_is_not_finite_reaches_the_sum() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1023, 3000] {
                let mut list = values(3001, 6);
                list[at] = bad;
                let [sum] = chunk_sums::<f32, _, _, 1, 1>(Level::detect(), &Itself, [&list]);
                assert!(!sum.is_finite(), "{bad} at {at}");
            }
        }
    }

    #[test]
    fn the_largest_f32_do_not_overflow() {
        let [sum] = chunk_sums::<f32, _, _, 1, 1>(Level::detect(), &Itself, [&[f32::MAX; 65_536]]);
        assert_eq!(sum.sqrt(), 256.0 * f64::from(f32::MAX));
    }
}
