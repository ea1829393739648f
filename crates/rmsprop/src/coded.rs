//! RMSprop with state of 8 bits on safe slices, without a plan or a backend.

use fusestep_elementwise::coded::{CodedState, CodedTensor, ParamSlices, step_coded_slices};
use fusestep_launch::RuleError;
use fusestep_simd::Pool;

use crate::{Centering, RmsProp, StepError};

/// Lists of one parameter with state of 8 bits. All have the same numel; 0 is allowed.
#[derive(Debug)]
pub struct CodedRmsPropTensors<'a> {
    /// p and g, by how p is kept.
    pub param: ParamSlices<'a>,
    /// v, in codes of its root; zeros before step 1.
    pub moment2: CodedState<'a>,
    /// b, in signed codes; zeros before step 1, and present exactly with momentum.
    pub velocity: Option<CodedState<'a>>,
}

impl RmsProp {
    /// Applies one step to every tensor, in the calling thread, with state of 8 bits.
    ///
    /// ```text
    /// v ← α·v + (1 − α)·g²
    /// b ← μ·b + g / (√v + ε)
    /// p ← p − lr·b
    /// ```
    /// The centered form is refused: its variance is the small difference of two numbers, of which
    /// 8 bits leave nothing.
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists, and a unit for each 32 elements, rounded up; 0 is
    /// allowed.
    /// # Units
    /// `step` counts from 1, and numbers the dither of v. `lr` and λ are per step.
    /// # Errors
    /// [`StepError`] naming the list, the tensor and both counts, or the centered form; everything
    /// is checked before anything is written. Any code and any unit is read.
    /// # Cost
    /// 14.25 bytes of memory traffic per element with parameters of f32, 8.25 with bf16, 10.25
    /// with bf16 and a remainder of 8 bits; 2.25 more with momentum.
    /// # Source
    /// As [`RmsProp::step`]; the codes are those of [`fusestep_elementwise::coded`].
    pub fn step_coded(
        &self,
        step: u64,
        tensors: &mut [CodedRmsPropTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`RmsProp::step_coded`].
    ///
    /// # Errors
    /// As [`RmsProp::step_coded`].
    pub fn step_coded_with(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [CodedRmsPropTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(Some(pool), step, tensors)
    }

    fn step_coded_on(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [CodedRmsPropTensors<'_>],
    ) -> Result<(), StepError> {
        if self.centering == Centering::Centered {
            let (what, expected) = ("centered", "0 with state of 8 bits");
            return Err(RuleError::Hyper { what, expected, found: 1.0 }.into());
        }
        self.check_velocity(tensors)?;
        if self.has_velocity() {
            let tensors = tensors.iter_mut().filter_map(|tensor| {
                let state = [&mut tensor.moment2, tensor.velocity.as_mut()?];
                let state = state.map(CodedState::reborrow);
                Some(CodedTensor { param: tensor.param.reborrow(), state })
            });
            step_coded_slices(self, step, pool, ["moment2", "velocity"], tensors.collect())
        } else {
            let tensors = tensors.iter_mut().map(|tensor| CodedTensor {
                param: tensor.param.reborrow(),
                state: [tensor.moment2.reborrow()],
            });
            step_coded_slices(self, step, pool, ["moment2"], tensors.collect())
        }
    }

    /// Whether every tensor has a velocity, or none has, as the settings ask for.
    fn check_velocity(&self, tensors: &[CodedRmsPropTensors<'_>]) -> Result<(), StepError> {
        let wanted = self.has_velocity();
        let (expected, found) = if wanted {
            ("a list, because momentum is above 0", "none")
        } else {
            ("none, because momentum is 0", "a list")
        };
        match tensors.iter().position(|tensor| tensor.velocity.is_some() != wanted) {
            Some(tensor) => Err(StepError::List { list: "velocity", tensor, expected, found }),
            None => Ok(()),
        }
    }
}
