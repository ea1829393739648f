//! What `kernels/lion.cu` reads: entries, list order, scalars, sets and flags.

use fusestep_tensor::Role;

/// Flag: the gradient's sign is turned (maximize).
pub const FLAG_MAXIMIZE: u32 = 1;

/// Scalars shared by all tensors, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scalars<T> {
    /// β₁.
    pub beta1: T,
    /// 1 − β₁, formed in f64.
    pub one_minus_beta1: T,
    /// β₂.
    pub beta2: T,
    /// 1 − β₂, formed in f64.
    pub one_minus_beta2: T,
}

/// Scalars of the tensors of one class at one step, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Set<T> {
    /// The learning rate times the tensor's own factor.
    pub lr: T,
    /// 1 − lr·λ.
    pub decay: T,
}

/// Lists of state in the order of a record's addresses.
pub(crate) const STATE: [Role; 1] = [Role::Moment1];
