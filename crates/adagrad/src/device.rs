//! What `kernels/adagrad.cu` reads: entries, list order, scalars, sets and flags.

use fusestep_tensor::Role;

/// Flag: the gradient's sign is turned (maximize).
pub const FLAG_MAXIMIZE: u32 = 1;

/// Scalars shared by all tensors, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scalars<T> {
    /// ε.
    pub eps: T,
}

/// Scalars of the tensors of one class at one step, in the compute type; padded to a multiple of 8
/// bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Set<T> {
    /// lr / (1 + (t − 1)·lr_decay).
    pub step_size: T,
    /// λ.
    pub l2: T,
    /// What the sum starts from at the first step, else 0.
    pub initial: T,
}

/// Lists of state in the order of a record's addresses.
pub(crate) const STATE: [Role; 1] = [Role::Sum];
