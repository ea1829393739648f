//! Sums over micro-steps where gradients lie on a device.

use fusestep_tensor::DType;

use crate::Buffer;

/// Gradients of one tensor, and the sums over micro-steps that they go to or come from.
pub struct Accumulate<'a> {
    /// The type of gradients; sums are of the same, of 16-bit ones in f32.
    pub dtype: DType,
    /// The sums, and the byte that they begin with.
    pub sums: (&'a mut dyn Buffer, usize),
    /// The gradients, and the byte that they begin with.
    pub grads: (&'a mut dyn Buffer, usize),
    /// Element count.
    pub numel: u64,
    /// What is done.
    pub what: Accumulation,
}

/// What becomes of sums over micro-steps; factors are rounded to the sums' type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Accumulation {
    /// `sums ← grads · weight`.
    First {
        /// What gradients are multiplied with.
        weight: f64,
    },
    /// `sums ← sums + grads · weight`.
    Add {
        /// What gradients are multiplied with.
        weight: f64,
    },
    /// `grads ← sums / divisor`, rounded once to the gradients' type.
    Mean {
        /// What sums are divided by.
        divisor: f64,
    },
}
