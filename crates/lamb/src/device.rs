//! Inputs of `kernels/lamb.cu`: entries, list order, scalars and step scalars.
//!
//! This module is always compiled, so that the two sides cannot drift apart unseen. The emulator
//! tests run the same bytes.

pub use fusestep_elementwise::Compute;
use fusestep_tensor::Role;

/// Scalars shared by all tensors, in the compute type; in the arguments they follow the workspace.
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

/// Scalars of the direction of one group's tensors at one step, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Direction<T> {
    /// √(1 − β₂ᵗ) / (1 − β₁ᵗ).
    pub scale: T,
    /// ε·√(1 − β₂ᵗ).
    pub eps: T,
    /// λ.
    pub lambda: T,
}

/// Step scalars of one group's tensors at one step; padded to a multiple of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepScalars<T> {
    /// Learning rate times the tensor's factor.
    pub lr: f64,
    /// 1 if the step is scaled by the trust ratio, 0 if not.
    pub trust: f64,
    /// The direction's scalars.
    pub direction: Direction<T>,
}

/// Scalars of one tensor's update, computed from its sums and its group's step scalars, in the
/// compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Finished<T> {
    /// lr·φ.
    pub step_size: T,
    /// The direction's scalars.
    pub direction: Direction<T>,
}

/// Lists of state in the order of a record's addresses.
pub(crate) const STATE: [Role; 2] = [Role::Moment1, Role::Moment2];
