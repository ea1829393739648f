//! Sums over the changes of an update: how far each tensor moved in a step, taken while its
//! elements are at hand.
//!
//! ```text
//! sum of a tensor = Σ (new − old)²    in f64, of the parameter as it is stored,
//!                                     or of its master where it has one
//! ```
//! The tree is that of all sums: leaves of 1,024 elements, chunks of [`CHUNK_ELEMENTS`], whatever
//! the limits say. A chunk leaves [`CHUNK_UNITS`] values behind, since on a device so many blocks
//! may share it; unit u is the fold of leaves u, u + 8, …, u + 56 by 32, 16 and 8.

use crate::{Buffer, CHUNK_ELEMENTS, CHUNK_UNITS};

/// The sums of the units of a chunk.
pub type UnitSums = [f64; CHUNK_UNITS as usize];

/// The sum over a chunk: its units, folded by 4, 2 and 1.
pub fn fold_units(units: &UnitSums) -> f64 {
    let [a, b, c, d, e, f, g, h] = *units;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Places for the sums over the changes of a launch.
pub struct UpdateSums<'a> {
    /// One [`UnitSums`] for each chunk of the storage, tensor by tensor; those of tensors that are
    /// not in the launch stay as they are.
    pub rows: &'a mut dyn Buffer,
    /// Row of each tensor's first chunk, and one past the last tensor's.
    pub firsts: &'a [u64],
}

impl UpdateSums<'_> {
    /// Index in [`Self::rows`] for the chunk that holds element `first_element` of tensor `tensor`.
    ///
    /// The index is past all rows if the storage has no such tensor.
    pub fn row(&self, tensor: u32, first_element: u64) -> u64 {
        let first = self.firsts.get(tensor as usize).copied();
        let chunk = first_element / u64::from(CHUNK_ELEMENTS);
        first.unwrap_or(u64::MAX).saturating_add(chunk)
    }
}

/// Addresses that a device reads to sum up the changes of one record, besides its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRecord {
    /// Address of the copy of its values from before the update.
    pub kept: u64,
    /// Address of an f64 that is not 0 if the update has skipped the tensor; 0 if it skips none.
    pub skipped: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_fold_by_halves() {
        let units: UnitSums = std::array::from_fn(|unit| 1.0 + 0.1 * unit as f64);
        let mut expected = units;
        for half in [4, 2, 1] {
            for j in 0..half {
                expected[j] += expected[j + half];
            }
        }
        assert_eq!(fold_units(&units).to_bits(), expected[0].to_bits());
    }
}
