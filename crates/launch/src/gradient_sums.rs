//! Sums over micro-steps where gradients lie on a device.

use fusestep_tensor::DType;

use crate::Buffer;

/// Gradients of one tensor, and the sums over micro-steps that they go to or come from.
pub struct Accumulate<'a> {
    /// Storage type of the gradients. Sums of 16-bit gradients are f32, others of the same type.
    pub dtype: DType,
    /// The sums, and the byte that they begin with.
    pub sums: (&'a mut dyn Buffer, usize),
    /// The gradients, and the byte that they begin with.
    pub grads: (&'a mut dyn Buffer, usize),
    /// Element count.
    pub numel: u64,
    /// The operation on sums and gradients.
    pub what: Accumulation,
}

/// An operation on sums over micro-steps; its factor is rounded to the sums' type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Accumulation {
    /// `sums ← grads · weight`.
    First {
        /// Factor on the gradients.
        weight: f64,
    },
    /// `sums ← sums + grads · weight`.
    Add {
        /// Factor on the gradients.
        weight: f64,
    },
    /// `grads ← sums / divisor`, rounded once to the gradients' type.
    Mean {
        /// Divisor of the sums.
        divisor: f64,
    },
}
