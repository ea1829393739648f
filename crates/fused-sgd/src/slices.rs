//! SGD on safe slices, without a plan or a backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_launch::UpdateRule;
use fusestep_simd::Pool;

use crate::{Sgd, StepError};

/// Tensors of one parameter. All slices have the same numel; 0 is allowed.
#[derive(Debug)]
pub struct SgdTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// u, updated in place; zeros before step 1, and present exactly with momentum.
    pub velocity: Option<&'a mut [T]>,
}

impl Sgd {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// g ← r·g;  g ← g + λ·p if L2
    /// u ← μ·u + (1 − τ)·g          τ = 0 at the first step
    /// p ← p·(1 − lr·λ) − lr·u      (no decay factor with L2; g + μ·u in place of u with Nesterov)
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
    /// 12 bytes of memory traffic per f32 element, 20 with momentum.
    /// # Source
    /// Sutskever, Martens, Dahl & Hinton 2013, with lr outside the velocity; dampening and first
    /// step as in PyTorch.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [SgdTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Sgd::step`].
    ///
    /// # Errors
    /// As [`Sgd::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [SgdTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(Some(pool), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [SgdTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.validate()?;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let (param, grad) = (&mut *tensor.param, tensor.grad);
            let refuse = |expected, found| StepError::List {
                list: "velocity",
                tensor: index,
                expected,
                found,
            };
            match (&mut tensor.velocity, self.has_velocity()) {
                (Some(velocity), true) => {
                    with.push(SliceTensor { param, grad, state: [&mut **velocity] })
                }
                (None, false) => without.push(SliceTensor { param, grad, state: [] }),
                (None, true) => {
                    return Err(refuse("a slice, because momentum is above 0", "none"));
                }
                (Some(_), false) => {
                    return Err(refuse("none, because momentum is 0", "a slice"));
                }
            }
        }
        if self.has_velocity() {
            step_slices(self, step, pool, with)
        } else {
            step_slices(self, step, pool, without)
        }
    }
}
