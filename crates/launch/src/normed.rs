//! Kernels whose update of a tensor needs sums over the whole of it: LARS and LAMB.

use fusestep_tensor::Trust;

use crate::{GroupValues, HostCall, MAX_LISTS};

/// Most sums that a kernel takes over a tensor.
pub const MAX_SUMS: usize = 2;

/// Most bytes of finished step scalars.
pub const FINISHED_BYTES: usize = 64;

/// Bytes at the start of a normed kernel's scalars that belong to the backend, not to the kernel;
/// see [`Workspace`].
pub const WORKSPACE_BYTES: usize = 24;

/// Parts of a chunk that a device's blocks sum and update apart.
pub const CHUNK_UNITS: u64 = 8;

/// Values of f64 that a device keeps for a chunk: [`MAX_SUMS`] partial sums of each unit, how often
/// its tensor was skipped, and 1 if it was in the last step.
pub const ROW_VALUES: u64 = CHUNK_UNITS * MAX_SUMS as u64 + 2;

/// Whether a tensor is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The tensor is updated.
    Update,
    /// A sum or a scalar derived from it is not finite: the tensor and its state stay as they are.
    Skip,
}

/// The learning rate of tensors that are excluded from weight decay: their own decay is set to 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Excluded {
    /// The plain rate, as large-batch training of ResNet-50 does best.
    #[default]
    PlainLr,
    /// The rate scaled by the trust ratio, as for all other tensors.
    TrustRatio,
}

impl Excluded {
    /// Name of the choice: `plain_lr` or `trust_ratio`.
    pub const fn name(self) -> &'static str {
        match self {
            Excluded::PlainLr => "plain_lr",
            Excluded::TrustRatio => "trust_ratio",
        }
    }

    /// 1 if excluded tensors take the plain rate, else 0, as a device reads it.
    pub fn plain_scalar(self) -> f64 {
        f64::from(self == Excluded::PlainLr)
    }

    /// Whether the rate of a tensor with these values is scaled: the tensor's own word first, then
    /// this option.
    pub fn trust(self, values: &GroupValues) -> Trust {
        match (values.trust, values.weight_decay, self) {
            (Some(trust), _, _) => trust,
            (None, Some(0.0), Excluded::PlainLr) => Trust::Plain,
            _ => Trust::Ratio,
        }
    }
}

/// The part of a kernel, besides [`crate::MultiTensorKernel`], that takes sums over a tensor before
/// it updates it.
///
/// A backend takes the sums of every chunk ([`NormedKernel::chunk_sums`]) and adds up a tensor's
/// chunks ([`crate::tree_sum`]). The kernel derives the scalars of the update from them
/// ([`NormedKernel::finish`]). The backend then runs [`crate::MultiTensorKernel::run_host`] with
/// these in place of the group's step scalars. Sums follow the fixed tree, whose chunk is
/// [`crate::CHUNK_ELEMENTS`] whatever the limits say, so they depend on the tensor alone.
pub trait NormedKernel: Send + Sync {
    /// The device entries; [`crate::MultiTensorKernel::entry`] is the name of both together.
    fn sums_and_update(&self) -> SumsAndUpdate;

    /// The sums over one chunk, at most [`crate::CHUNK_ELEMENTS`] elements; `lists` hold exactly
    /// those, in the kernel's order. Sums that the kernel does not take are 0; those that are
    /// not wanted may be anything, and nothing need be read for them.
    fn chunk_sums(
        &self,
        call: HostCall<'_>,
        group: u32,
        lists: [&[u8]; MAX_LISTS],
        wanted: [bool; MAX_SUMS],
    ) -> [f64; MAX_SUMS];

    /// Derives the scalars of a tensor's update from its sums, in f64 and rounded once, and writes
    /// them into `step_scalars`.
    fn finish(
        &self,
        call: HostCall<'_>,
        group: u32,
        sums: [f64; MAX_SUMS],
        step_scalars: &mut [u8; FINISHED_BYTES],
    ) -> Outcome;

    /// The position of the sum that is Σ g² over the gradient as it is stored, if there is one. A
    /// step that clips by the global norm has taken it already, in the same tree.
    fn grad_sum(&self) -> Option<usize> {
        None
    }

    /// The position of the sum that is Σ p² over the parameter, or its master where there is one,
    /// if there is such a sum. The update that writes parameters can take it along
    /// ([`HostCall::squares`]), so that the next step reads them once instead of twice.
    ///
    /// A backend may use it for as long as it can tell that nobody else has written the parameters
    /// since. The bits are those of [`NormedKernel::chunk_sums`] over what was written.
    fn param_sum(&self) -> Option<usize> {
        None
    }
}

/// Device entries: all sums in one launch, all updates in the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumsAndUpdate {
    /// Takes the sums: `lars_momentum_sums_f32`.
    pub sums: &'static str,
    /// Updates: `lars_momentum_update_f32`.
    pub update: &'static str,
}

/// The place of partial sums on a device, and the part of them that a launch touches. The scalars
/// of a normed kernel begin with it.
///
/// Every chunk has a row of its own for the whole step, so no row is written twice and none has
/// to be buffered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Device address of the rows, each [`ROW_VALUES`] f64.
    pub rows: u64,
    /// Row of the launch's first chunk.
    pub first_row: u32,
    /// Chunks of the first record's tensor in earlier launches.
    pub head_chunks: u32,
    /// Chunks of the last record's tensor in later launches.
    pub tail_chunks: u32,
}

impl Workspace {
    /// The bytes that `kernels/normed.cuh` reads.
    pub fn bytes(&self) -> [u8; WORKSPACE_BYTES] {
        let mut bytes = [0; WORKSPACE_BYTES];
        bytes[..8].copy_from_slice(&self.rows.to_le_bytes());
        let words = [self.first_row, self.head_chunks, self.tail_chunks];
        for (bytes, word) in bytes[8..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensors_own_word_comes_before_the_option() {
        let values = |weight_decay, trust| GroupValues {
            lr: 1.0,
            lr_scale: 1.0,
            weight_decay,
            trust,
            step: 1,
        };
        for (excluded, weight_decay, trust, expected) in [
            (Excluded::PlainLr, None, None, Trust::Ratio),
            (Excluded::PlainLr, Some(0.1), None, Trust::Ratio),
            (Excluded::PlainLr, Some(0.0), None, Trust::Plain),
            (Excluded::TrustRatio, Some(0.0), None, Trust::Ratio),
            (Excluded::PlainLr, Some(0.0), Some(Trust::Ratio), Trust::Ratio),
            (Excluded::TrustRatio, None, Some(Trust::Plain), Trust::Plain),
        ] {
            assert_eq!(excluded.trust(&values(weight_decay, trust)), expected);
        }
    }

    #[test]
    fn the_workspace_is_little_endian_in_the_order_of_its_fields() {
        let workspace = Workspace { rows: 0x0102, first_row: 4, head_chunks: 5, tail_chunks: 6 };
        let mut expected = [0; WORKSPACE_BYTES];
        (expected[0], expected[1]) = (2, 1);
        (expected[8], expected[12], expected[16]) = (4, 5, 6);
        assert_eq!(workspace.bytes(), expected);
    }
}
