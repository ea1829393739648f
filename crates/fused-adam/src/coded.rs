//! Adam whose moments take a byte an element, on safe slices: no plan, no backend.

use fusestep_elementwise::coded::{CodedState, CodedTensor, ParamSlices, step_coded_slices};
use fusestep_simd::Pool;

use crate::{Adam, SecondMoment, StepError};

/// The tensors of one parameter with moments of 8 bits; all lists have the same numel, 0 allowed.
#[derive(Debug)]
pub struct CodedAdamTensors<'a> {
    /// p and g, by how p is kept.
    pub param: ParamSlices<'a>,
    /// m, in signed codes; zeros before step 1.
    pub moment1: CodedState<'a>,
    /// v, in codes of its root; zeros before step 1.
    pub moment2: CodedState<'a>,
    /// Largest v so far, in codes of its root; zeros before step 1, and present exactly with
    /// [`SecondMoment::Largest`].
    pub max_moment2: Option<CodedState<'a>>,
}

impl Adam {
    /// Applies one step to every tensor, in the calling thread, with moments kept in 8 bits.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// p ← p·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
    /// ```
    /// The arithmetic is that of [`Adam::step`] in f32, between reading and writing of codes: a
    /// parameter moves by the moments before they are rounded. Groups of 32 elements have one unit
    /// for m and one for v ([`fusestep_elementwise::coded`]). Bits are the same for any number of
    /// threads and SIMD level.
    ///
    /// # Shapes
    /// A tensor has the same numel in all lists, and a unit for each 32 elements, rounded up; 0 is
    /// allowed.
    /// # Units
    /// `step` (t) counts from 1, and numbers the dither of v. `lr` and λ are per step.
    /// # Errors
    /// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`],
    /// [`StepError::Units`], [`StepError::List`]; everything is checked before anything is written.
    /// Any code and any unit is read.
    /// # Cost
    /// 16.5 bytes of memory traffic per element with parameters of f32, 10.5 with bf16, 12.5 with
    /// bf16 and a remainder of 8 bits; 2.25 more with AMSGrad.
    /// # Source
    /// The codes are this project's own. Groups of 32, roots of 8 bits and a remainder of 8 bits
    /// are as in FlashOptim, arXiv:2602.23349.
    pub fn step_coded(
        &self,
        step: u64,
        tensors: &mut [CodedAdamTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(None, step, tensors)
    }

    /// Applies one step to every tensor on all threads of `pool`, with the same bits as
    /// [`Adam::step_coded`].
    ///
    /// # Errors
    /// As [`Adam::step_coded`].
    pub fn step_coded_with(
        &self,
        pool: &Pool,
        step: u64,
        tensors: &mut [CodedAdamTensors<'_>],
    ) -> Result<(), StepError> {
        self.step_coded_on(Some(pool), step, tensors)
    }

    fn step_coded_on(
        &self,
        pool: Option<&Pool>,
        step: u64,
        tensors: &mut [CodedAdamTensors<'_>],
    ) -> Result<(), StepError> {
        self.check_max_moment2(tensors)?;
        match self.second_moment {
            SecondMoment::Running => {
                let tensors = tensors.iter_mut().map(|tensor| CodedTensor {
                    param: tensor.param.reborrow(),
                    state: [&mut tensor.moment1, &mut tensor.moment2].map(CodedState::reborrow),
                });
                let names = ["moment1", "moment2"];
                step_coded_slices(self, step, pool, names, tensors.collect())
            }
            SecondMoment::Largest => {
                let tensors = tensors.iter_mut().filter_map(|tensor| {
                    let max_moment2 = tensor.max_moment2.as_mut()?;
                    let state = [&mut tensor.moment1, &mut tensor.moment2, max_moment2];
                    let state = state.map(CodedState::reborrow);
                    Some(CodedTensor { param: tensor.param.reborrow(), state })
                });
                let names = ["moment1", "moment2", "max_moment2"];
                step_coded_slices(self, step, pool, names, tensors.collect())
            }
        }
    }

    /// Whether every tensor has a largest second moment, or none has, as the settings ask for.
    fn check_max_moment2(&self, tensors: &[CodedAdamTensors<'_>]) -> Result<(), StepError> {
        let (expected, found) = match self.second_moment {
            SecondMoment::Running => ("none, because the second moment is `Running`", "a list"),
            SecondMoment::Largest => ("a list, because the second moment is `Largest`", "none"),
        };
        let wanted = self.second_moment == SecondMoment::Largest;
        match tensors.iter().position(|tensor| tensor.max_moment2.is_some() != wanted) {
            Some(tensor) => Err(StepError::List { list: "max_moment2", tensor, expected, found }),
            None => Ok(()),
        }
    }
}
