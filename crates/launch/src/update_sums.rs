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

use crate::pack::Writer;
use crate::resident::push_chunks;
use crate::{
    ArgumentLayout, Batch, Buffer, CHUNK_ELEMENTS, CHUNK_UNITS, Launch, LaunchLimits,
    MultiTensorKernel,
};

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
    pub rows: &'a mut dyn Buffer,
    /// Row of each tensor's first chunk, and one past the last tensor's.
    pub firsts: &'a [u64],
}

impl UpdateSums<'_> {
    /// The row of a chunk of a tensor; past all rows if the storage has no such tensor.
    pub fn row(&self, tensor: u32, first_element: u64) -> u64 {
        let first = self.firsts.get(tensor as usize).copied();
        let chunk = first_element / u64::from(CHUNK_ELEMENTS);
        first.unwrap_or(u64::MAX).saturating_add(chunk)
    }
}

/// What a device reads to sum up the changes of one record, beside its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRecord {
    /// Address of the copy of its values from before the update.
    pub kept: u64,
    /// Address of an f64 that is not 0 if the update has skipped the tensor; 0 if it skips none.
    pub skipped: u64,
}

/// The bytes of the table from which a device keeps the values of a batch before the update, and
/// sums up their changes behind it; `kernels/update_sums.cu` reads it.
///
/// `values` are the positions of the lists that make up a value, with their addresses; `sums` is
/// the address of the rows, and `changed` is as long as the batch's records.
///
/// # Panics
/// If the launch leaves no sums.
pub fn pack_update_sums(
    launch: &Launch<'_>,
    batch: &Batch,
    values: &[(usize, u64)],
    (control, sums): (u64, u64),
    changed: &[ChangedRecord],
) -> Vec<u8> {
    let rows = launch.update_sums.as_ref();
    let rows = rows.expect("the launch leaves sums over what it changes");
    let layout = ArgumentLayout { lists: values.len() + 3, scalar_bytes: 8, step_scalar_bytes: 0 };
    let mut out = vec![0; layout.bytes(batch.records.len(), 0)];
    let mut writer = Writer { out: &mut out, at: 0 };
    let counts = [batch.records.len() as u32, 0];
    writer.header(counts, launch.limits.chunk_elements, 0, control);
    writer.u64(sums);
    for (record, changed) in batch.records.iter().zip(changed) {
        let element = launch.offsets[record.tensor as usize] + record.first_element;
        for &(list, address) in values {
            let width = launch.lists[list].dtype().len_bytes() as u64;
            writer.u64(address + element.wrapping_sub(launch.first(list)) * width);
        }
        writer.u64(changed.kept);
        writer.u64(rows.row(record.tensor, record.first_element));
        writer.u64(changed.skipped);
        writer.place(record);
    }
    debug_assert_eq!(writer.at, out.len());
    push_chunks(&mut out, batch, launch.limits.chunk_elements);
    out
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
        Self { chunk_elements: CHUNK_ELEMENTS, ..self }
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
