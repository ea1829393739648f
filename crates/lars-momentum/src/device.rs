//! What `kernels/lars_momentum.cu` reads: entries, list order, scalars and step scalars.
//!
//! Always compiled, so that the two sides cannot drift apart unseen: the emulator tests run the
//! same bytes.

pub use fusestep_elementwise::Compute;
use fusestep_tensor::Role;

/// Scalars shared by all tensors that the local rate is made of; behind the workspace, before those
/// of the update.
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

/// Scalars shared by all tensors that the update reads, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scalars<T> {
    /// μ.
    pub momentum: T,
    /// Factor on every gradient.
    pub rescale: T,
}

/// What the local rate of the tensors of one group is made of at one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepScalars {
    /// Learning rate times the tensor's factor.
    pub lr: f64,
    /// λ.
    pub lambda: f64,
    /// 1 if the rate is scaled by the trust ratio, 0 if not.
    pub trust: f64,
}

/// What one tensor's sums and its group's step scalars are finished to, in the compute type.
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
