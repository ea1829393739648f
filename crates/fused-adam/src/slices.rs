//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_launch::UpdateRule;
use fusestep_simd::Pool;

use crate::{Adam, SecondMoment, StepError};

/// The tensors of one parameter; all slices have the same numel, 0 allowed.
#[derive(Debug)]
pub struct AdamTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// m, updated in place; zeros before step 1.
    pub moment1: &'a mut [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// Largest v so far, updated in place; zeros before step 1, and present exactly with
    /// [`SecondMoment::Largest`].
    pub max_moment2: Option<&'a mut [T]>,
}

impl Adam {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// p ← p·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`] naming the list,
    /// the tensor and both counts, [`StepError::List`]; everything is checked before
    /// anything is written.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Loshchilov & Hutter 2019, Algorithm 2, arXiv:1711.05101; λ is multiplied by lr, as PyTorch
    /// does and the paper does not.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Adam::step`].
    ///
    /// # Errors
    /// As [`Adam::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(Some(pool), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [AdamTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.validate()?;
        let (mut running, mut largest) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let (param, grad) = (&mut *tensor.param, tensor.grad);
            let (m, v) = (&mut *tensor.moment1, &mut *tensor.moment2);
            let refuse = |expected, found| StepError::List {
                list: "max_moment2",
                tensor: index,
                expected,
                found,
            };
            match (&mut tensor.max_moment2, self.second_moment) {
                (Some(w), SecondMoment::Largest) => {
                    largest.push(SliceTensor { param, grad, state: [m, v, &mut **w] })
                }
                (None, SecondMoment::Running) => {
                    running.push(SliceTensor { param, grad, state: [m, v] })
                }
                (None, SecondMoment::Largest) => {
                    let expected = "a slice, because the second moment is `Largest`";
                    return Err(refuse(expected, "none"));
                }
                (Some(_), SecondMoment::Running) => {
                    let expected = "none, because the second moment is `Running`";
                    return Err(refuse(expected, "a slice"));
                }
            }
        }
        match self.second_moment {
            SecondMoment::Running => step_slices(self, step, pool, running),
            SecondMoment::Largest => step_slices(self, step, pool, largest),
        }
    }
}
