//! RMSprop on safe slices, without a plan or a backend.

use fusestep_elementwise::{Compute, SliceTensor, step_slices};
use fusestep_launch::UpdateRule;
use fusestep_simd::Pool;

use crate::{Centering, RmsProp, StepError};

/// Tensors of one parameter. All slices have the same numel; 0 is allowed.
#[derive(Debug)]
pub struct RmsPropTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// a, updated in place; zeros before step 1, and present exactly if centered.
    pub moment1: Option<&'a mut [T]>,
    /// b, updated in place; zeros before step 1, and present exactly with momentum.
    pub velocity: Option<&'a mut [T]>,
}

impl RmsProp {
    /// Applies one step to every tensor, in the calling thread.
    ///
    /// ```text
    /// v ← α·v + (1 − α)·g²          a ← α·a + (1 − α)·g if centered
    /// b ← μ·b + g / (√s + ε)        s = max(v − a², 0) if centered, else v
    /// p ← p − lr·b
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
    /// 20 bytes of memory traffic per f32 element, 8 more for each of `moment1` and `velocity`.
    /// # Source
    /// Tieleman & Hinton 2012, lecture 6.5; Graves 2013, arXiv:1308.0850, for the centered form.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [RmsPropTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`RmsProp::step`].
    ///
    /// # Errors
    /// As [`RmsProp::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [RmsPropTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.step_on(Some(pool), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [RmsPropTensors<'_, T>],
    ) -> Result<(), StepError> {
        self.validate()?;
        for (index, tensor) in tensors.iter().enumerate() {
            self.check_lists(index, tensor)?;
        }
        let (mut one, mut two, mut three) = (Vec::new(), Vec::new(), Vec::new());
        for tensor in tensors {
            let (param, grad) = (&mut *tensor.param, tensor.grad);
            let v = &mut *tensor.moment2;
            match (&mut tensor.moment1, &mut tensor.velocity) {
                (None, None) => one.push(SliceTensor { param, grad, state: [v] }),
                (Some(last), None) | (None, Some(last)) => {
                    two.push(SliceTensor { param, grad, state: [v, &mut **last] })
                }
                (Some(a), Some(b)) => {
                    three.push(SliceTensor { param, grad, state: [v, &mut **a, &mut **b] })
                }
            }
        }
        match (self.centering, self.has_velocity()) {
            (Centering::MeanSquare, false) => step_slices(self, step, pool, one),
            (Centering::Centered, true) => step_slices(self, step, pool, three),
            _ => step_slices(self, step, pool, two),
        }
    }

    /// Whether a tensor brings the lists that these settings use, and no others.
    fn check_lists<T>(
        &self,
        index: usize,
        tensor: &RmsPropTensors<'_, T>,
    ) -> Result<(), StepError> {
        let centered = self.centering == Centering::Centered;
        for (list, there, wanted, with, without) in [
            (
                "moment1",
                tensor.moment1.is_some(),
                centered,
                "a slice, because the step is centered",
                "none, because the step is not centered",
            ),
            (
                "velocity",
                tensor.velocity.is_some(),
                self.has_velocity(),
                "a slice, because momentum is above 0",
                "none, because momentum is 0",
            ),
        ] {
            if there != wanted {
                return Err(StepError::List {
                    list,
                    tensor: index,
                    expected: if wanted { with } else { without },
                    found: if there { "a slice" } else { "none" },
                });
            }
        }
        Ok(())
    }
}
