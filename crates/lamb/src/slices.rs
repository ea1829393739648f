//! LAMB on safe slices, without a plan or a backend.

use fusestep_elementwise::{Compute, OwnHyper, SliceTensor, step_normed_slices};
use fusestep_simd::Pool;
use fusestep_tensor::Trust;

use crate::{Lamb, StepError};

/// Tensors of one parameter, and its own hyper-parameters. All slices have the same numel; 0 is
/// allowed.
#[derive(Debug)]
pub struct LambTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// m, updated in place; zeros before step 1.
    pub moment1: &'a mut [T],
    /// v, updated in place; zeros before step 1.
    pub moment2: &'a mut [T],
    /// Factor on the learning rate; usually 1.
    pub lr_scale: f64,
    /// λ of this tensor; `None` takes that of [`Lamb`].
    pub weight_decay: Option<f64>,
    /// Whether the trust ratio scales the rate; `None` leaves the choice to [`Lamb::excluded`].
    pub trust: Option<Trust>,
}

impl<'a, T> LambTensors<'a, T> {
    /// Tensors with the optimizer's own hyper-parameters.
    pub fn new(
        param: &'a mut [T],
        grad: &'a [T],
        moment1: &'a mut [T],
        moment2: &'a mut [T],
    ) -> Self {
        Self { param, grad, moment1, moment2, lr_scale: 1.0, weight_decay: None, trust: None }
    }
}

impl Lamb {
    /// Applies one step to every tensor, in the calling thread. Returns the positions of tensors
    /// that stay as they are because a norm or the rate is not finite.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// r = m/(1 − β₁ᵗ) / (√v/√(1 − β₂ᵗ) + ε) + λ·p
    /// p ← p − lr·φ·r        φ = ‖p‖/‖r‖ if trusted and neither is 0, else 1
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`],
    /// [`StepError::OwnHyper`]; everything is checked before anything is written.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element, 44 if a tensor exceeds the cache.
    /// # Source
    /// You et al. 2020, Algorithm 2, arXiv:1904.00962, with φ the identity.
    pub fn step<T: Compute>(
        &self,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, StepError> {
        self.step_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Lamb::step`].
    ///
    /// # Errors
    /// As [`Lamb::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, StepError> {
        self.step_on(Some(pool), step, tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [LambTensors<'_, T>],
    ) -> Result<Vec<usize>, StepError> {
        let tensors = tensors.iter_mut().map(|tensor| {
            let own = OwnHyper {
                lr_scale: tensor.lr_scale,
                weight_decay: tensor.weight_decay,
                trust: tensor.trust,
            };
            let slices = SliceTensor {
                param: &mut *tensor.param,
                grad: tensor.grad,
                state: [&mut *tensor.moment1, &mut *tensor.moment2],
            };
            (slices, own)
        });
        step_normed_slices(self, step, pool, tensors.collect())
    }
}
