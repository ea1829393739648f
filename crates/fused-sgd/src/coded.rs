//! SGD whose velocity takes a byte an element, on safe slices: no plan, no backend.

use fusestep_elementwise::coded::{CodedState, CodedTensor, ParamSlices, step_coded_slices};
use fusestep_launch::RuleError;
use fusestep_simd::Pool;

use crate::{Sgd, StepError};

/// Lists of one parameter with a velocity of 8 bits. All have the same numel; 0 is allowed.
#[derive(Debug)]
pub struct CodedSgdTensors<'a> {
    /// p and g, by how p is kept.
    pub param: ParamSlices<'a>,
    /// u, in signed codes; zeros before step 1.
    pub velocity: CodedState<'a>,
}

impl Sgd {
    /// Applies one step to every tensor, in the calling thread, with a velocity of 8 bits.
    ///
    /// ```text
    /// u ← μ·u + (1 − τ)·g          τ = 0 at the first step
    /// p ← p·(1 − lr·λ) − lr·u      (no decay factor with L2; g + μ·u in place of u with Nesterov)
    /// ```
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists, and a unit for each 32 elements, rounded up; 0 is
    /// allowed.
    /// # Units
    /// `step` (t) counts from 1. `lr` and λ are per step.
    /// # Errors
    /// [`StepError`] naming the list, the tensor and both counts, or a momentum of 0, which keeps
    /// no velocity; everything is checked before anything is written. Any code and any unit is
    /// read.
    /// # Cost
    /// 14.25 bytes of memory traffic per element with parameters of f32, 8.25 with bf16, 10.25
    /// with bf16 and a remainder of 8 bits.
    /// # Source
    /// As [`Sgd::step`]; the codes are those of [`fusestep_elementwise::coded`].
    pub fn step_coded(
        &self,
        step: u64,
        tensors: &mut [CodedSgdTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Sgd::step_coded`].
    ///
    /// # Errors
    /// As [`Sgd::step_coded`].
    pub fn step_coded_with(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [CodedSgdTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(Some(pool), step, tensors)
    }

    fn step_coded_on(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [CodedSgdTensors<'_>],
    ) -> Result<(), StepError> {
        if !self.has_velocity() {
            let expected = "a value in (0, 1) with a velocity of 8 bits";
            return Err(RuleError::Hyper { what: "momentum", expected, found: 0.0 }.into());
        }
        let tensors = tensors.iter_mut().map(|tensor| CodedTensor {
            param: tensor.param.reborrow(),
            state: [tensor.velocity.reborrow()],
        });
        step_coded_slices(self, step, pool, ["velocity"], tensors.collect())
    }
}
