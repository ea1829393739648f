//! Argument tables that stay in a backend's memory: built once, launched with the same few words at
//! every step.
//!
//! Beside the table lie the values that its step scalars are derived from: the rule's
//! hyper-parameters, and those of every group of tensors with the steps it has taken. The device
//! counts and derives itself, by the operations of [`MultiTensorKernel::write_step_scalars`]. So a
//! step takes the same launches with the same arguments whatever the number of tensors, and the
//! host waits for nothing.
//!
//! ```text
//! steps:  { f64 hyper[8]; u64 seed; u32 groups; u32 step_scalar_bytes } | group₀ group₁ …
//! group:  { f64 lr_scale; f64 weight_decay; u64 step; u32 own_decay; u32 trust }
//! table:  the argument block of a batch | u32 record of chunk₀, chunk₁, …
//! launch: header and scalars of the table, with [`FLAG_RESIDENT`] | u64 address of the table
//! ```
//! `kernels/multi_tensor.cuh` and `kernels/resident.cuh` read it.

use std::any::Any;
use std::fmt;

use fusestep_tensor::Trust;

use crate::pack::push_chunks;
use crate::{
    Addresses, ArgumentLayout, Batch, GroupValues, HYPER_VALUES, Launch, MultiTensorKernel,
    MultiTensorReduction, Reduce, ResidentStepScalars, pack, pack_reduction,
    pack_reduction_of_tensors, pack_tensors,
};

/// Bytes of [`pack_steps`] before the groups.
pub const STEPS_BYTES: usize = HYPER_VALUES * 8 + 16;

/// Bytes of [`pack_steps`] for one group.
pub const GROUP_BYTES: usize = 32;

/// A launch's tables in a backend's memory.
///
/// Made by [`crate::Tables::place_table`] or [`crate::Tables::place_reduction`], for the backend
/// that made it.
pub trait ResidentTable: Send + fmt::Debug {
    /// The table as a value of any type, from which its backend gets back its own type.
    fn as_any(&self) -> &dyn Any;
    /// The table as a value of any type, from which its backend gets back its own type.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Launches that a backend has recorded instead of running them; see
/// [`crate::DeviceStream::capture`].
///
/// A graph keeps the memory that its launches refer to.
pub trait Graph: Send + fmt::Debug {
    /// Enqueues all its launches, by one call.
    ///
    /// # Errors
    /// [`crate::BackendError::Device`] with the device's own code.
    fn launch(&self) -> Result<(), crate::BackendError>;
}

/// The bytes that a device derives the step scalars of one batch from.
///
/// `values` are the hyper-parameters of the launch's groups at the next step.
pub fn pack_steps(
    step_scalars: &ResidentStepScalars,
    layout: ArgumentLayout,
    batch: &Batch,
    values: &[GroupValues],
) -> Vec<u8> {
    let mut out = Vec::with_capacity(STEPS_BYTES + batch.groups.len() * GROUP_BYTES);
    let lr = values.first().map_or(0.0, |values| values.lr);
    out.extend_from_slice(&lr.to_le_bytes());
    for value in &step_scalars.hyper[1..] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.extend_from_slice(&step_scalars.seed.to_le_bytes());
    for count in [batch.groups.len(), layout.step_scalar_bytes] {
        out.extend_from_slice(&(count as u32).to_le_bytes());
    }
    debug_assert_eq!(out.len(), STEPS_BYTES);
    for &group in &batch.groups {
        let own = &values[group as usize];
        let trust = match own.trust {
            None => 0u32,
            Some(Trust::Ratio) => 1,
            Some(Trust::Plain) => 2,
        };
        out.extend_from_slice(&own.lr_scale.to_le_bytes());
        out.extend_from_slice(&own.weight_decay.unwrap_or(0.0).to_le_bytes());
        // The device counts the step before it derives from it.
        out.extend_from_slice(&own.step.saturating_sub(1).to_le_bytes());
        out.extend_from_slice(&u32::from(own.weight_decay.is_some()).to_le_bytes());
        out.extend_from_slice(&trust.to_le_bytes());
    }
    out
}

/// The bytes of a batch's table: its argument block, and the record of every chunk.
pub fn pack_table(launch: &Launch<'_>, batch: &Batch, addresses: Addresses<'_>) -> Vec<u8> {
    let layout = launch.kernel.argument_layout();
    let mut out = vec![0; layout.bytes(batch.records.len(), batch.groups.len())];
    pack(launch, batch, addresses, &mut out);
    push_chunks(&mut out, batch, launch.limits.chunk_elements);
    out
}

/// The bytes of the table of one batch of a reduction. `list` is the address of the list,
/// `partials` that of the batch's first partial sum.
pub fn pack_reduction_table(
    reduce: &Reduce<'_>,
    batch: &Batch,
    list: u64,
    partials: u64,
) -> Vec<u8> {
    let kernel: &dyn MultiTensorReduction = reduce.kernel;
    let mut out = vec![0; kernel.argument_layout().bytes(batch.records.len(), 0)];
    pack_reduction(kernel, batch, reduce.offsets, list, partials, &mut out);
    push_chunks(&mut out, batch, kernel.chunk_elements());
    out
}

/// [`pack_table`] of tensors that lie anywhere, as [`crate::pack_tensors`] has them. Step scalars
/// are 0 until the device derives them, so that the bytes change with what they refer to alone.
pub fn pack_table_of_tensors(
    launch: &Launch<'_>,
    batch: &Batch,
    tensors: &[u64],
    control: u64,
) -> Vec<u8> {
    let layout = launch.kernel.argument_layout();
    let mut out = vec![0; layout.bytes(batch.records.len(), batch.groups.len())];
    pack_tensors(launch, batch, tensors, control, &mut out);
    let first = layout.bytes(0, 0);
    out[first..first + batch.groups.len() * layout.step_scalar_bytes].fill(0);
    push_chunks(&mut out, batch, launch.limits.chunk_elements);
    out
}

/// [`pack_reduction_table`] of tensors that lie anywhere.
pub fn pack_reduction_table_of_tensors(
    reduce: &Reduce<'_>,
    batch: &Batch,
    tensors: &[u64],
    partials: u64,
) -> Vec<u8> {
    let kernel: &dyn MultiTensorReduction = reduce.kernel;
    let mut out = vec![0; kernel.argument_layout().bytes(batch.records.len(), 0)];
    pack_reduction_of_tensors(kernel, batch, tensors, partials, &mut out);
    push_chunks(&mut out, batch, kernel.chunk_elements());
    out
}

/// Flag of a launch's header: behind its scalars stands the address of the table, which has step
/// scalars and records.
pub const FLAG_RESIDENT: u32 = 1 << 30;

/// The arguments of launches from a table that lies at `address`: its header and its scalars, then
/// the address.
pub fn pack_launch_of_table(table: &[u8], layout: ArgumentLayout, address: u64) -> Vec<u8> {
    let mut out = table[..layout.bytes(0, 0)].to_vec();
    let flags = u32::from_le_bytes([out[12], out[13], out[14], out[15]]);
    out[12..16].copy_from_slice(&(flags | FLAG_RESIDENT).to_le_bytes());
    out.extend_from_slice(&address.to_le_bytes());
    out
}

/// The entry that derives step scalars, and what it reads; refuses a kernel without one.
///
/// # Errors
/// [`crate::BackendError::Unavailable`] naming the kernel.
pub fn resident_step_scalars(
    backend: &'static str,
    kernel: &dyn MultiTensorKernel,
) -> Result<ResidentStepScalars, crate::BackendError> {
    kernel
        .resident()
        .ok_or_else(|| crate::BackendError::Unavailable {
            backend,
            reason: format!(
                "`{}`: expected an entry that derives step_scalars on the device, found none; plan with \
                 arguments",
                kernel.entry()
            ),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batchable, LaunchLimits, batches};

    fn batch(numels: &[u64]) -> Batch {
        let limits = LaunchLimits {
            argument_bytes: usize::MAX,
            chunk_elements: 4,
            ..LaunchLimits::default()
        };
        let layout = ArgumentLayout { lists: 3, scalar_bytes: 8, step_scalar_bytes: 8 };
        let tensors = (0..).zip(numels).map(|(tensor, &numel)| Batchable {
            tensor,
            first_element: 0,
            numel,
            group: tensor % 2,
        });
        let mut all = batches("test", tensors, layout, limits).unwrap();
        assert_eq!(all.len(), 1);
        all.remove(0)
    }

    fn words(bytes: &[u8]) -> Vec<u32> {
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|word| u32::from_le_bytes(*word)).collect()
    }

    #[test]
    fn every_chunk_knows_its_record() {
        let mut out = Vec::new();
        push_chunks(&mut out, &batch(&[1, 4, 5, 0, 13]), 4);
        assert_eq!(words(&out), [0, 1, 2, 2, 3, 3, 3, 3]);
    }

    #[test]
    fn a_launch_of_a_table_has_its_head_and_its_address() {
        let layout = ArgumentLayout { lists: 1, scalar_bytes: 8, step_scalar_bytes: 16 };
        let table: Vec<u8> = (0..100).collect();
        let found = pack_launch_of_table(&table, layout, 0x0102);
        let mut expected = table[..32].to_vec();
        expected[15] |= 0x40;
        expected.extend_from_slice(&[2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(found, expected);
    }

    #[test]
    fn steps_are_those_taken_and_the_rate_comes_first() {
        let values = |lr_scale, step| GroupValues {
            lr: 0.5,
            lr_scale,
            weight_decay: Some(0.25),
            trust: Some(Trust::Plain),
            step,
        };
        let step_scalars = ResidentStepScalars::new("rule_sets_f32", &[2.0, 3.0], 9);
        let layout = ArgumentLayout { lists: 3, scalar_bytes: 8, step_scalar_bytes: 24 };
        let bytes =
            pack_steps(&step_scalars, layout, &batch(&[1, 1]), &[values(1.0, 1), values(0.5, 7)]);
        assert_eq!(bytes.len(), STEPS_BYTES + 2 * GROUP_BYTES);
        let f64_at = |at: usize| f64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([f64_at(0), f64_at(8), f64_at(16), f64_at(24)], [0.5, 2.0, 3.0, 0.0]);
        assert_eq!(bytes[64..72], 9u64.to_le_bytes());
        assert_eq!(words(&bytes[72..80]), [2, 24]);
        let second = STEPS_BYTES + GROUP_BYTES;
        assert_eq!([f64_at(second), f64_at(second + 8)], [0.5, 0.25]);
        assert_eq!(words(&bytes[second + 16..]), [6, 0, 1, 2]);
    }
}
