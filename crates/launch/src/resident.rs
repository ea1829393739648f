//! Argument tables that stay in a backend's memory: built once, launched with the same few words at
//! every step.
//!
//! Beside the table lies what its step scalars are derived from: hyper-parameters, and for every
//! group of tensors its own and the steps it has taken. The device counts and derives itself, by
//! the operations of [`MultiTensorKernel::write_step_scalars`], so that a step takes the same
//! launches with the same arguments whatever the number of tensors, and the host waits for nothing.
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

use crate::{
    Addresses, ArgumentLayout, Batch, GroupValues, Launch, MultiTensorKernel, MultiTensorReduction,
    Reduce, pack, pack_reduction,
};

/// Hyper-parameters that a device derives step scalars from, the learning rate first.
pub const HYPER_VALUES: usize = 8;

/// Bytes before the groups.
pub const STEPS_BYTES: usize = HYPER_VALUES * 8 + 16;

/// Bytes of one group.
pub const GROUP_BYTES: usize = 32;

/// What a kernel offers besides [`MultiTensorKernel`] to run from a resident table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidentStepScalars {
    /// The device entry that derives the step scalars: `fused_adam_sets_f32`, as such entries have
    /// always been named.
    pub entry: &'static str,
    /// The rule's hyper-parameters as the entry reads them; the first is left for the learning
    /// rate.
    pub hyper: [f64; HYPER_VALUES],
    /// Start of the random numbers of stochastic rounding.
    pub seed: u64,
}

impl ResidentStepScalars {
    /// The entry and the hyper-parameters behind the learning rate.
    ///
    /// # Panics
    /// If there are more than fit: a rule has a fixed number.
    pub fn new(entry: &'static str, behind_lr: &[f64], seed: u64) -> Self {
        let mut hyper = [0.0; HYPER_VALUES];
        hyper[1..=behind_lr.len()].copy_from_slice(behind_lr);
        Self { entry, hyper, seed }
    }
}

/// The entry that derives step scalars: by the type that arithmetic is done in.
///
/// ```
/// # use fusestep_launch::{step_scalars_entry, Format, Precision};
/// # use fusestep_tensor::DType;
/// let format = Format::new("adamw", DType::BF16, Precision::default()).unwrap();
/// assert_eq!(step_scalars_entry!("fused_adam", format), "fused_adam_sets_f32");
/// ```
#[macro_export]
macro_rules! step_scalars_entry {
    ($stem:literal, $format:expr) => {
        match $format.layout() {
            $crate::Layout::F64 => concat!($stem, "_sets_f64"),
            _ => concat!($stem, "_sets_f32"),
        }
    };
}

/// A launch's tables in a backend's memory.
///
/// Made by [`crate::Backend::place_table`] or [`crate::Backend::place_reduction`], for the backend
/// that made it.
pub trait ResidentTable: Send + fmt::Debug {
    /// For the backend that made it.
    fn as_any(&self) -> &dyn Any;
    /// For the backend that made it.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// What a backend has recorded instead of running it; see [`crate::Backend::capture`].
///
/// Keeps the memory it refers to.
pub trait Graph: Send + fmt::Debug {
    /// Enqueues all of it, by one call.
    ///
    /// # Errors
    /// [`crate::BackendError::Device`] with the device's own code.
    fn launch(&self) -> Result<(), crate::BackendError>;
}

/// What the step scalars of one batch are derived from, as the device reads it.
///
/// `values` are those of the next step, by group of the launch.
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

/// The bytes of the table of one batch of a reduction; `addresses` are those of the list and of the
/// batch's first partial sum.
pub fn pack_reduction_table(reduce: &Reduce<'_>, batch: &Batch, addresses: (u64, u64)) -> Vec<u8> {
    let kernel: &dyn MultiTensorReduction = reduce.kernel;
    let mut out = vec![0; kernel.argument_layout().bytes(batch.records.len(), 0)];
    pack_reduction(kernel, batch, reduce.offsets, addresses, &mut out);
    push_chunks(&mut out, batch, kernel.chunk_elements());
    out
}

/// In the flags of a launch's header: behind its scalars stands the address of the table that has
/// step scalars and records.
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

pub(crate) fn push_chunks(out: &mut Vec<u8>, batch: &Batch, chunk_elements: u32) {
    out.reserve(4 * batch.chunks as usize);
    for (index, record) in batch.records.iter().enumerate() {
        for _ in 0..chunks_of(record.numel, chunk_elements) {
            out.extend_from_slice(&(index as u32).to_le_bytes());
        }
    }
}

fn chunks_of(numel: u64, chunk_elements: u32) -> u32 {
    // A batch's chunks fit a u32 together.
    u32::try_from(numel.div_ceil(u64::from(chunk_elements))).unwrap_or(u32::MAX)
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
