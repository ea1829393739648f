//! What `kernels/fused_adam.cu` reads: entries, list order, scalars, sets and flags.
//!
//! Always compiled, so that the two sides cannot drift apart unseen: the emulator tests run the
//! same bytes.

pub use fusestep_elementwise::Compute;
use fusestep_tensor::Role;

/// Flag: a fifth list, `max_moment2`, replaces `moment2` in the root (AMSGrad).
pub const FLAG_AMSGRAD: u32 = 1;

/// Flag: the gradient's sign is turned (maximize).
pub const FLAG_MAXIMIZE: u32 = 2;

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
    /// lr·√(1 − β₂ᵗ) / (1 − β₁ᵗ).
    pub step_size: T,
    /// ε·√(1 − β₂ᵗ).
    pub eps: T,
    /// 1 − lr·λ if decay is decoupled, else 1.
    pub decay: T,
    /// λ if decay is L2, else 0.
    pub l2: T,
}

/// Lists of state in the order of a record's addresses; the last only with AMSGrad.
pub(crate) const STATE: [Role; 3] = [Role::Moment1, Role::Moment2, Role::MaxMoment2];
