//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_launch::UpdateRule;
use fusestep_simd::Pool;

use crate::{ScheduleFree, StepError};

/// The tensors of one parameter; all slices have the same numel, 0 allowed.
#[derive(Debug)]
pub struct ScheduleFreeTensors<'a, T> {
    /// y, where gradients are taken; updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// z, updated in place; step 1 sets it, whatever it was.
    pub base: &'a mut [T],
}

impl ScheduleFree {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// v ← β₂·v + (1 − β₂)·g²
    /// n = g / (√(v / (1 − β₂ᵗ)) + ε) + λ·y        γ = lr·min(1, t / warm-up)
    /// y ← y + c·(z − y) − γ·(1 − β₁·(1 − c))·n     c = γ² / (sum of γ² so far)
    /// z ← z − γ·n
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` counts from 1 without gaps. `lr` and λ are per step.
    /// # Errors
    /// [`StepError`] naming the list, the tensor and both counts; everything is checked before
    /// anything is written.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Defazio et al. 2024, algorithm 1, arXiv:2405.15682.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [ScheduleFreeTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, None, slices(tensors))
    }

    /// [`ScheduleFree::step`] on all threads of `pool`, with the same bits.
    ///
    /// # Errors
    /// As [`ScheduleFree::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [ScheduleFreeTensors<'_, T>],
    ) -> Result<(), StepError> {
        step_slices(self, step, Some(pool), slices(tensors))
    }

    /// Writes the average x, which is what a model is evaluated and shipped with, and leaves y and
    /// z as they are: training goes on with its bits.
    ///
    /// ```text
    /// x = y + (1 − 1/β₁)·(z − y)
    /// ```
    ///
    /// # Errors
    /// [`StepError::Rule`] for hyper-parameters out of range, [`StepError::NumelMismatch`] for
    /// lists of other lengths than `param`.
    pub fn average<T: Compute>(
        &self,
        param: &[T],
        base: &[T],
        out: &mut [T],
    ) -> Result<(), StepError> {
        self.validate()?;
        for (list, found) in [("base", base.len()), ("out", out.len())] {
            if found != param.len() {
                return Err(StepError::NumelMismatch {
                    list,
                    tensor: 0,
                    expected: param.len(),
                    found,
                });
            }
        }
        let factor = T::round(1.0 - 1.0 / self.beta1);
        for ((x, &y), &z) in out.iter_mut().zip(param).zip(base) {
            *x = y + factor * (z - y);
        }
        Ok(())
    }
}

fn slices<'a, T>(tensors: &'a mut [ScheduleFreeTensors<'_, T>]) -> Vec<SliceTensor<'a, T, 2>> {
    let slices = tensors.iter_mut().map(|tensor| SliceTensor {
        param: &mut *tensor.param,
        grad: tensor.grad,
        state: [&mut *tensor.moment2, &mut *tensor.base],
    });
    slices.collect()
}
