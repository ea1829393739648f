//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_simd::Pool;

use crate::{Lion, StepError};

/// The tensors of one parameter; all slices have the same numel, 0 allowed.
#[derive(Debug)]
pub struct LionTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// m, updated in place; zeros before step 1.
    pub moment1: &'a mut [T],
}

impl Lion {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// p ← p·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g)        sign(0) = 0
    /// m ← β₂·m + (1 − β₂)·g
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` counts from 1, though every step is alike. `lr` and λ are per step.
    /// # Errors
    /// [`StepError`] naming the list, the tensor and both counts; everything is checked before
    /// anything is written.
    /// # Cost
    /// 20 bytes of memory traffic per f32 element.
    /// # Source
    /// Chen et al. 2023, Algorithm 2, arXiv:2302.06675.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [LionTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, None, slices(tensors))
    }

    /// [`Lion::step`] on all threads of `pool`, with the same bits.
    ///
    /// # Errors
    /// As [`Lion::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [LionTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, Some(pool), slices(tensors))
    }
}

fn slices<'a, T>(tensors: &'a mut [LionTensors<'_, T>]) -> Vec<SliceTensor<'a, T, 1>> {
    let slices = tensors.iter_mut().map(|tensor| SliceTensor {
        param: &mut *tensor.param,
        grad: tensor.grad,
        state: [&mut *tensor.moment1],
    });
    slices.collect()
}
