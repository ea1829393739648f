//! What `kernels/fused_sgd.cu` reads: entries, list order, scalars, sets and flags.

use fusestep_launch::{Access, TensorList};
use fusestep_tensor::{DType, Role};

/// Flag: there is a third list, the velocity.
pub const FLAG_VELOCITY: u32 = 1;

/// Flag: the parameter goes along gradient and velocity (Nesterov); only with [`FLAG_VELOCITY`].
pub const FLAG_NESTEROV: u32 = 2;

/// Flag: the gradient's sign is turned (maximize).
pub const FLAG_MAXIMIZE: u32 = 4;

/// Scalars shared by all tensors, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Scalars<T> {
    /// Factor on the gradient.
    pub rescale: T,
    /// μ.
    pub momentum: T,
}

/// Scalars of the tensors of one class at one step, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Set<T> {
    /// The learning rate times the tensor's own factor.
    pub lr: T,
    /// 1 − lr·λ if decay is decoupled, else 1.
    pub decay: T,
    /// λ if decay is L2, else 0.
    pub l2: T,
    /// 1 − τ, and 1 at the first step.
    pub one_minus_dampening: T,
}

/// The device entry for parameters of this dtype, without its argument suffix.
pub(crate) fn entry(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "fused_sgd_f64",
        _ => "fused_sgd_f32",
    }
}

/// The lists in the order of a record's addresses; the last only with momentum.
pub(crate) fn lists(dtype: DType) -> [TensorList; 3] {
    let list = |role, access| TensorList {
        role,
        dtype,
        access,
    };
    [
        list(Role::Param, Access::ReadWrite),
        list(Role::Grad, Access::Read),
        list(Role::Velocity, Access::ReadWrite),
    ]
}
