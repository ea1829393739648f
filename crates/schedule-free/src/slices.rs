//! Schedule-Free AdamW on safe slices, without a plan or a backend.

use fusestep_elementwise::{Compute, element_slices};
use fusestep_launch::UpdateRule;

use crate::{ScheduleFree, StepError};

element_slices! {
    /// Tensors of one parameter. All slices have the same numel; 0 is allowed.
    pub struct ScheduleFreeTensors of ScheduleFree {
        /// v, updated in place; zeros before step 1.
        moment2,
        /// z, updated in place; step 1 sets it, whatever it was.
        base,
    }
    /// ```text
    /// v ← β₂·v + (1 − β₂)·g²
    /// n = g / (√(v / (1 − β₂ᵗ)) + ε) + λ·y        γ = lr·min(1, t / warm-up)
    /// y ← y + c·(z − y) − γ·(1 − β₁·(1 − c))·n     c = γ² / (sum of γ² so far)
    /// z ← z − γ·n
    /// ```
    ///
    /// The parameter is y, where gradients are taken. Steps count without gaps.
    /// # Cost
    /// 28 bytes of memory traffic per f32 element.
    /// # Source
    /// Defazio et al. 2024, algorithm 1, arXiv:2405.15682.
    step
}

impl ScheduleFree {
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
