//! Inputs of `kernels/lars_momentum.cu`: entries, list order, scalars and step scalars.
//!
//! This module is always compiled, so that the two sides cannot drift apart unseen. The emulator
//! tests run the same bytes.

pub use fusestep_elementwise::Compute;
use fusestep_tensor::Role;

/// Scalars of the local rate that all tensors share; in the arguments they stand between the
/// workspace and the scalars of the update.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct RateScalars {
    /// η.
    pub trust_coefficient: f64,
    /// ε.
    pub eps: f64,
    /// Factor on the gradient's norm.
    pub rescale: f64,
}

/// Scalars of the update that all tensors share, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scalars<T> {
    /// μ.
    pub momentum: T,
    /// Factor on every gradient.
    pub rescale: T,
}

/// Scalars of the local rate of one group's tensors at one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepScalars {
    /// The learning rate times the tensor's factor.
    pub lr: f64,
    /// λ.
    pub lambda: f64,
    /// 1 if the rate is scaled by the trust ratio, 0 if not.
    pub trust: f64,
}

/// Scalars of one tensor's update, computed from its sums and its group's step scalars, in the
/// compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Finished<T> {
    /// The tensor's learning rate.
    pub local: T,
    /// λ.
    pub lambda: T,
}

/// Lists of state in the order of a record's addresses.
pub(crate) const STATE: [Role; 1] = [Role::Velocity];
