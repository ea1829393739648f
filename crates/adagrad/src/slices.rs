//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_simd::Pool;

use crate::{Adagrad, StepError};

/// The tensors of one parameter; all slices have the same numel, 0 allowed.
#[derive(Debug)]
pub struct AdagradTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// s, updated in place; zeros before step 1, which adds the initial value.
    pub sum: &'a mut [T],
}

impl Adagrad {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// g ← g + λ·p        s ← s + g²
    /// p ← p − lr / (1 + (t − 1)·lr_decay) · g / (√s + ε)
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`StepError`] naming the list, the tensor and both counts; everything is checked before
    /// anything is written.
    /// # Cost
    /// 20 bytes of memory traffic per f32 element.
    /// # Source
    /// Duchi, Hazan & Singer 2011; ε, the decay of lr and the initial value as in PyTorch.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [AdagradTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, None, slices(tensors))
    }

    /// [`Adagrad::step`] on all threads of `pool`, with the same bits.
    ///
    /// # Errors
    /// As [`Adagrad::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [AdagradTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, Some(pool), slices(tensors))
    }
}

fn slices<'a, T>(tensors: &'a mut [AdagradTensors<'_, T>]) -> Vec<SliceTensor<'a, T, 1>> {
    let slices = tensors.iter_mut().map(|tensor| SliceTensor {
        param: &mut *tensor.param,
        grad: tensor.grad,
        state: [&mut *tensor.sum],
    });
    slices.collect()
}
