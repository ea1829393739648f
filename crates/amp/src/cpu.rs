//! The sums of squares, and the conclusion from them, on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{Compute, NORM_CHUNK_ELEMENTS, Storage, chunk_square_sum};
use fusestep_launch::{
    ControlBlock, ControlRule, MultiTensorReduction, RuleError, SquareSum, TensorList,
    TensorPartials, tree_sum,
};
use fusestep_simd::Level;
use fusestep_tensor::DType;
use half::{bf16, f16};

use crate::device::{FINISH_ENTRY, FinishScalars, STEM, list, norm_entry};
use crate::{Finding, LossScale, MaxNorm};

/// Kernel for sums of squares and non-finite counts of gradients in `P`, read through `C`.
///
/// # Cost
/// One read of the gradients: 4 bytes of memory traffic per f32 element.
#[derive(Debug, Clone, Copy, Default)]
pub struct NormKernel<C, P>(PhantomData<(C, P)>);

impl<C, P> MultiTensorReduction for NormKernel<C, P>
where
    C: Compute + Into<f64>,
    P: Storage<C>,
{
    fn stem(&self) -> &'static str {
        STEM
    }

    fn entry(&self) -> &'static str {
        norm_entry(P::DTYPE)
    }

    fn list(&self) -> TensorList {
        list(P::DTYPE)
    }

    fn chunk_elements(&self) -> u32 {
        NORM_CHUNK_ELEMENTS as u32
    }

    fn run_host(&self, level: Level, chunk: &[u8]) -> SquareSum {
        chunk_square_sum::<C, P>(level, bytemuck::cast_slice(chunk))
    }
}

/// The kernel for gradients of this dtype.
///
/// # Errors
/// [`RuleError::DType`] for a dtype without a kernel.
pub fn norm_kernel(dtype: DType) -> Result<Box<dyn MultiTensorReduction>, RuleError> {
    match dtype {
        DType::F32 => Ok(Box::new(NormKernel::<f32, f32>::default())),
        DType::F64 => Ok(Box::new(NormKernel::<f64, f64>::default())),
        DType::F16 => Ok(Box::new(NormKernel::<f32, f16>::default())),
        DType::BF16 => Ok(Box::new(NormKernel::<f32, bf16>::default())),
        found => Err(RuleError::DType {
            rule: "the norm of gradients",
            expected: "f32, f64, f16 or bf16",
            found,
        }),
    }
}

/// Rule by which a step draws its conclusions from its gradients: clip factor, finite check, next
/// loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientRule {
    /// The limit of the norm.
    pub max_norm: MaxNorm,
    /// The loss scale that a run starts with, and its policy.
    pub loss_scale: LossScale,
}

impl GradientRule {
    /// The control block before the first step, or after a checkpoint.
    pub fn first_block(loss_scale: LossScale) -> ControlBlock {
        ControlBlock {
            loss_scale: loss_scale.scale(),
            good_steps: loss_scale.good_steps(),
            bad_steps: loss_scale.bad_steps(),
            ..ControlBlock::default()
        }
    }

    /// The control block of a step whose squares sum up to `total`. The step's loss was multiplied
    /// with the scale of `before`.
    ///
    /// The operations are those of `kernels/amp.cu`, in the same order.
    pub fn conclude(&self, total: SquareSum, before: ControlBlock) -> ControlBlock {
        let grad_norm = total.sum.sqrt() / before.loss_scale;
        // The sum of finite f64 gradients may overflow; no factor can repair that either.
        let found = if total.non_finite == 0 && grad_norm.is_finite() {
            Finding::Finite
        } else {
            Finding::NonFinite
        };
        // An earlier step of this rule wrote the block, or it was checked when a checkpoint was
        // loaded.
        let scale = LossScale::restored(
            self.loss_scale,
            before.loss_scale,
            before.good_steps,
            before.bad_steps,
        );
        let next = scale.unwrap_or(self.loss_scale).after(found);
        let (applied, skipped, found) = match found {
            Finding::Finite => (1, 0, 0),
            Finding::NonFinite => (0, 1, 1),
        };
        ControlBlock {
            grad_factor: self.max_norm.clip_factor(grad_norm) / before.loss_scale,
            grad_norm,
            loss_scale: next.scale(),
            non_finite: total.non_finite,
            found,
            good_steps: next.good_steps(),
            bad_steps: next.bad_steps(),
            reserved: 0,
            applied: before.applied + applied,
            skipped: before.skipped + skipped,
        }
    }
}

impl ControlRule for GradientRule {
    fn stem(&self) -> &'static str {
        STEM
    }

    fn entry(&self) -> &'static str {
        FINISH_ENTRY
    }

    fn scalars(&self) -> Vec<u8> {
        let scalars = FinishScalars::new(self.max_norm, self.loss_scale);
        bytemuck::bytes_of(&scalars).to_vec()
    }

    fn run_host(
        &self,
        partials: &[SquareSum],
        tensors: &[TensorPartials],
        sums: &mut [SquareSum],
        control: &mut ControlBlock,
    ) {
        for (tensor, sum) in tensors.iter().zip(&mut *sums) {
            let first = tensor.first as usize;
            *sum = tree_sum(tensor.count as usize, |chunk| partials[first + chunk]);
        }
        let total = tree_sum(tensors.len(), |tensor| sums[tensor]);
        *control = self.conclude(total, *control);
    }
}
