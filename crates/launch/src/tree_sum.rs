//! The upper part of the tree of all sums: chunks of a tensor, and tensors of a step.

use crate::SquareSum;

/// Number of neighbours that are folded at a time: the lanes of a warp of a device.
pub const TREE_WIDTH: usize = 32;

/// A value that a tree adds up: a sum of squares, to which adding [`Default`] changes no bit.
pub trait Summand: Copy + Default {
    /// This value plus another, each operation rounded once.
    fn plus(self, other: Self) -> Self;
}

impl Summand for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl<const N: usize> Summand for [f64; N]
where
    Self: Default,
{
    fn plus(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] + other[i])
    }
}

impl Summand for SquareSum {
    fn plus(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, non_finite: self.non_finite + other.non_finite }
    }
}

/// Adds up values `0..count` in a tree that their positions alone decide; `value` is asked for each
/// of them once, in order.
///
/// ```text
/// group   32 neighbours, counted from the first, folded by halves:
///         value j += value j + h for h = 16, 8, 4, 2, 1; a missing one is 0
/// tree    groups of values, groups of groups, until one is left
/// ```
///
/// Behind the last value zeros may stand: they change no bit of a sum of squares. No value at all
/// adds up to 0.
///
/// # Cost
/// `count` additions; an array of 32 values on the stack for each level.
pub fn tree_sum<T: Summand>(count: usize, mut value: impl FnMut(usize) -> T) -> T {
    // Most tensors: nothing to be folded with.
    if count == 1 {
        return value(0);
    }
    let mut below = 1;
    while below < count.div_ceil(TREE_WIDTH) {
        below *= TREE_WIDTH;
    }
    subtree(0..count, below, &mut value)
}

/// The values of a range, in groups of `below`.
fn subtree<T: Summand>(
    range: std::ops::Range<usize>,
    below: usize,
    value: &mut impl FnMut(usize) -> T,
) -> T {
    let mut lanes = [T::default(); TREE_WIDTH];
    for (lane, first) in lanes.iter_mut().zip(range.clone().step_by(below)) {
        *lane = match below {
            1 => value(first),
            _ => {
                let end = (first + below).min(range.end);
                subtree(first..end, below / TREE_WIDTH, value)
            }
        };
    }
    let mut half = TREE_WIDTH / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = lanes[lane].plus(lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The equation, level by level.
    fn naive(mut values: Vec<f64>) -> f64 {
        while values.len() > 1 {
            let group = |group: &[f64]| {
                let mut group = group.to_vec();
                group.resize(32, 0.0);
                for half in [16, 8, 4, 2, 1] {
                    for j in 0..half {
                        group[j] += group[j + half];
                    }
                }
                group[0]
            };
            values = values.chunks(32).map(group).collect();
        }
        values.first().copied().unwrap_or(0.0)
    }

    fn values(count: usize) -> Vec<f64> {
        let mut seed = 12_345u32;
        let next = |_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(seed) * f64::from(1 << (seed % 23))
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn it_is_the_naive_tree_at_every_count() {
        let counts = (0..=100).chain([1023, 1024, 1025, 32_767, 32_768, 32_769, 33_000]);
        for count in counts {
            let values = values(count);
            let found = tree_sum(count, |at| values[at]);
            assert_eq!(found.to_bits(), naive(values).to_bits(), "{count}");
        }
    }

    #[test]
    fn zeros_behind_the_last_value_change_no_bit() {
        for count in [1, 31, 32, 33, 1024, 1025] {
            let values = values(count);
            let value = |at: usize| values.get(at).copied().unwrap_or(0.0);
            let expected = tree_sum(count, value).to_bits();
            for zeros in [1, 31, 32, 1024, 40_000] {
                assert_eq!(tree_sum(count + zeros, value).to_bits(), expected);
            }
        }
    }

    #[test]
    fn values_are_asked_for_once_and_in_order() {
        for count in [0, 1, 32, 33, 1025, 2_000] {
            let mut asked = Vec::new();
            tree_sum(count, |at| {
                asked.push(at);
                1.0
            });
            assert_eq!(asked, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_order_matters() {
        // Or the tests above would pin nothing.
        let values = values(1000);
        let plain: f64 = values.iter().sum();
        assert_ne!(tree_sum(1000, |at| values[at]), plain);
    }
}
