//! What `kernels/lion.cu` reads: entries, list order, scalars, sets and flags.

use fusestep_launch::{Access, TensorList};
use fusestep_tensor::{DType, Role};

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

/// The device entry for parameters of this dtype, without its argument suffix.
pub(crate) fn entry(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "lion_f64",
        _ => "lion_f32",
    }
}

/// The lists in the order of a record's addresses.
pub(crate) fn lists(dtype: DType) -> [TensorList; 3] {
    let list = |role, access| TensorList {
        role,
        dtype,
        access,
    };
    [
        list(Role::Param, Access::ReadWrite),
        list(Role::Grad, Access::Read),
        list(Role::Moment1, Access::ReadWrite),
    ]
}
