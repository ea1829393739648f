//! LARS on safe slices, without a plan or a backend.

use fusestep_elementwise::{Compute, OwnHyper, SliceTensor, step_normed_slices};
use fusestep_simd::Pool;
use fusestep_tensor::Trust;

use crate::{Lars, StepError};

/// Tensors of one parameter, and its own hyper-parameters. All slices have the same numel; 0 is
/// allowed.
#[derive(Debug)]
pub struct LarsTensors<'a, T> {
    /// p, updated in place.
    pub param: &'a mut [T],
    /// g, only read.
    pub grad: &'a [T],
    /// u, updated in place; zeros before the first step.
    pub velocity: &'a mut [T],
    /// Factor on the learning rate; usually 1.
    pub lr_scale: f64,
    /// λ of this tensor; `None` takes that of [`Lars`].
    pub weight_decay: Option<f64>,
    /// Whether the trust ratio scales the rate; `None` leaves the choice to [`Lars::excluded`].
    pub trust: Option<Trust>,
}

impl<'a, T> LarsTensors<'a, T> {
    /// Tensors with the optimizer's own hyper-parameters.
    pub fn new(param: &'a mut [T], grad: &'a [T], velocity: &'a mut [T]) -> Self {
        Self { param, grad, velocity, lr_scale: 1.0, weight_decay: None, trust: None }
    }
}

impl Lars {
    /// Applies one step to every tensor, in the calling thread. Returns the positions of tensors
    /// that stay as they are because a norm or the rate is not finite.
    ///
    /// ```text
    /// P = ‖p‖        G = rescale·‖g‖
    /// local = lr·η·P / (G + λ·P + ε) if trusted, P > 0 and G > 0, else lr
    /// u ← μ·u + local·(rescale·g + λ·p)        p ← p − u
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists; 0 is allowed.
    /// # Units
    /// `lr` and λ are per step.
    /// # Errors
    /// [`StepError::Rule`], [`StepError::NumelMismatch`], [`StepError::OwnHyper`]; everything is
    /// checked before anything is written.
    /// # Cost
    /// 20 bytes of memory traffic per f32 element, 28 if a tensor exceeds the cache.
    /// # Source
    /// You, Gitman & Ginsburg 2017, arXiv:1708.03888; lr is inside of the velocity.
    pub fn step<T: Compute>(
        &self,
        tensors: &mut [LarsTensors<'_, T>],
    ) -> Result<Vec<usize>, StepError> {
        self.step_on(None, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Lars::step`].
    ///
    /// # Errors
    /// As [`Lars::step`].
    pub fn step_with<T: Compute>(
        &self,
        pool: &Pool,
        tensors: &mut [LarsTensors<'_, T>],
    ) -> Result<Vec<usize>, StepError> {
        self.step_on(Some(pool), tensors)
    }

    fn step_on<T: Compute>(
        &self,
        pool: Option<&Pool>,
        tensors: &mut [LarsTensors<'_, T>],
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
                state: [&mut *tensor.velocity],
            };
            (slices, own)
        });
        // Every step is alike.
        step_normed_slices(self, 1, pool, tensors.collect())
    }
}
