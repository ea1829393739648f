//! What `kernels/fused_adam.cu` reads: entries, list order, scalars, sets and flags.
//!
//! Always compiled, so that the two sides cannot drift apart unseen: the emulator tests run the same bytes.

use std::ops::{Add, Div, Mul, Neg, Sub};

use bytemuck::{Pod, Zeroable};
use fusestep_launch::{Access, TensorList};
use fusestep_tensor::{DType, Role};

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
    /// ε.
    pub eps: T,
}

/// Scalars of the tensors of one class at one step, in the compute type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Set<T> {
    /// lr / (1 − β₁ᵗ).
    pub step_size: T,
    /// √(1 − β₂ᵗ).
    pub bias2_sqrt: T,
    /// 1 − lr·λ if decay is decoupled, else 1.
    pub decay: T,
    /// λ if decay is L2, else 0.
    pub l2: T,
}

/// The type arithmetic is done in, and its names on the device.
pub trait Compute:
    Pod
    + Zeroable
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The storage type of parameters and gradients that are computed in this type.
    const DTYPE: DType;
    /// The device entry without its argument suffix.
    const ENTRY: &'static str;
    /// Rounds once, to nearest even.
    fn round(value: f64) -> Self;
    /// The correctly rounded square root.
    fn sqrt(self) -> Self;
}

impl Compute for f32 {
    const DTYPE: DType = DType::F32;
    const ENTRY: &'static str = "fused_adam_f32";
    fn round(value: f64) -> Self {
        value as f32
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
}

impl Compute for f64 {
    const DTYPE: DType = DType::F64;
    const ENTRY: &'static str = "fused_adam_f64";
    fn round(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
}

/// Bytes of `elements` values of `T`, rounded up to a multiple of 8.
pub(crate) const fn padded_bytes<T>(elements: usize) -> usize {
    (elements * size_of::<T>()).next_multiple_of(8)
}

/// Writes values and zeroes the padding behind them.
pub(crate) fn write_padded<T: Pod>(values: &[T], out: &mut [u8]) {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    out[..bytes.len()].copy_from_slice(bytes);
    out[bytes.len()..].fill(0);
}

/// Reads `N` values from the start of `bytes`, which may be unaligned.
pub(crate) fn read_values<T: Pod, const N: usize>(bytes: &[u8]) -> [T; N] {
    let mut values = [T::zeroed(); N];
    let target: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    let len_bytes = target.len();
    target.copy_from_slice(&bytes[..len_bytes]);
    values
}

/// The lists in the order of a record's addresses; the last only with AMSGrad.
pub(crate) fn lists(dtype: DType) -> [TensorList; 5] {
    let list = |role, access| TensorList {
        role,
        dtype,
        access,
    };
    [
        list(Role::Param, Access::ReadWrite),
        list(Role::Grad, Access::Read),
        list(Role::Moment1, Access::ReadWrite),
        list(Role::Moment2, Access::ReadWrite),
        list(Role::MaxMoment2, Access::ReadWrite),
    ]
}
