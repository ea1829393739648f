//! Sums over what an update changes: how far each tensor moved in a step, taken while its elements
//! are at hand.
//!
//! ```text
//! sum of a tensor = Σ (new − old)²    in f64, of the parameter as it is stored,
//!                                     or of its master where it has one
//! ```
//! The tree is that of all sums: leaves of 1,024 elements, chunks of [`CHUNK_ELEMENTS`], whatever
//! the limits say. A chunk leaves [`CHUNK_UNITS`] values behind, since on a device so many blocks
//! may share it; unit u is the fold of leaves u, u + 8, …, u + 56 by 32, 16 and 8.

use crate::{
    ArgumentLayout, Buffer, CHUNK_ELEMENTS, CHUNK_UNITS, Launch, LaunchLimits, MultiTensorKernel,
};

/// Words behind a record: the address of the [`UnitSums`] of its first chunk.
pub const UPDATE_SUM_WORDS: usize = 1;

/// What is kept of a chunk.
pub type UnitSums = [f64; CHUNK_UNITS as usize];

/// The sum over a chunk: its units, folded by 4, 2 and 1.
pub fn fold_units(units: &UnitSums) -> f64 {
    let [a, b, c, d, e, f, g, h] = *units;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Where a launch leaves the sums over what it changes.
pub struct UpdateSums<'a> {
    /// One [`UnitSums`] for each chunk of the storage, tensor by tensor; those of tensors that are
    /// not in the launch stay as they are.
    pub slots: &'a mut dyn Buffer,
    /// Slot of each tensor's first chunk, and one past the last tensor's.
    pub firsts: &'a [u64],
}

impl UpdateSums<'_> {
    /// The slot of a chunk of a tensor; past all slots if the storage has no such tensor.
    pub fn slot(&self, tensor: u32, first_element: u64) -> u64 {
        let first = self.firsts.get(tensor as usize).copied();
        let chunk = first_element / u64::from(CHUNK_ELEMENTS);
        first.unwrap_or(u64::MAX).saturating_add(chunk)
    }
}

impl Launch<'_> {
    /// Bytes of scalars, sets and records of this launch.
    pub fn argument_layout(&self) -> ArgumentLayout {
        let layout = self.kernel.argument_layout();
        match self.update_sums {
            Some(_) => layout.with_update_sums(),
            None => layout,
        }
    }
}

impl ArgumentLayout {
    /// The layout of launches that leave sums over what they change.
    pub const fn with_update_sums(self) -> Self {
        Self {
            lists: self.lists + UPDATE_SUM_WORDS,
            ..self
        }
    }
}

impl LaunchLimits {
    /// The limits for batches of `kernel`: a kernel that takes sums is cut at the chunks of their
    /// tree.
    pub fn of(self, kernel: &dyn MultiTensorKernel) -> Self {
        match kernel.normed() {
            Some(_) => self.measured(),
            None => self,
        }
    }

    /// The limits for launches that leave sums over what they change, whatever the kernel.
    pub fn measured(self) -> Self {
        Self {
            chunk_elements: CHUNK_ELEMENTS,
            ..self
        }
    }
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
