//! Inputs of `kernels/amp.cu`: entries, list and settings.

use fusestep_launch::{Access, TensorList};
use fusestep_tensor::{DType, Role};

use crate::{LossScale, MaxNorm, ScalePolicy};

/// Stem of the kernel file.
pub(crate) const STEM: &str = "amp";

/// Entry of the kernel that draws the conclusion, run as one block.
pub(crate) const FINISH_ENTRY: &str = "amp_finish";

/// Settings of the conclusion; in the arguments they follow the header, three addresses and the
/// tensor count.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct FinishScalars {
    /// The limit of the norm; infinite if there is none.
    pub max_norm: f64,
    /// [`ScalePolicy::growth`].
    pub growth: f64,
    /// [`ScalePolicy::backoff`].
    pub backoff: f64,
    /// [`ScalePolicy::floor`].
    pub floor: f64,
    /// [`ScalePolicy::ceiling`].
    pub ceiling: f64,
    /// [`ScalePolicy::growth_interval`].
    pub growth_interval: u32,
    /// [`ScalePolicy::backoff_interval`].
    pub backoff_interval: u32,
}

const _: () = assert!(size_of::<FinishScalars>() == 48);

impl FinishScalars {
    pub(crate) fn new(max_norm: MaxNorm, scale: LossScale) -> Self {
        let ScalePolicy { growth, backoff, growth_interval, backoff_interval, floor, ceiling } =
            scale.policy();
        Self {
            max_norm: max_norm.value(),
            growth,
            backoff,
            floor,
            ceiling,
            growth_interval,
            backoff_interval,
        }
    }
}

/// The entry of the kernel that sums gradients of this dtype, without its argument suffix.
pub(crate) fn norm_entry(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "amp_norm_f64",
        DType::F16 => "amp_norm_f16",
        DType::BF16 => "amp_norm_bf16",
        _ => "amp_norm_f32",
    }
}

/// The list of gradients, which the kernel only reads.
pub(crate) fn list(dtype: DType) -> TensorList {
    TensorList { role: Role::Grad, dtype, access: Access::Read }
}
