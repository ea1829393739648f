//! The crate alone: safe slices, no plan, no backend.

use fusestep_elementwise::mixed::{
    Before, Floats, FloatsMut, MixedStep, MixedTensor, StateMut, step_mixed_slices,
};
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

/// The tensors of one parameter, each with a dtype of its own; all have the same numel, 0 allowed.
#[derive(Debug)]
pub struct MixedAdamTensors<'a> {
    /// t, the number of this step, from 1 on.
    pub step: u64,
    /// p, updated in place: a master of f32, or a parameter of 16 bits.
    pub param: FloatsMut<'a>,
    /// g, only read, of any dtype.
    pub grad: Floats<'a>,
    /// m, updated in place; zeros before step 1.
    pub moment1: StateMut<'a>,
    /// v, of the dtype of m, updated in place; zeros before step 1.
    pub moment2: StateMut<'a>,
    /// Largest v so far, of the dtype of m; zeros before step 1, and present exactly with
    /// [`SecondMoment::Largest`].
    pub max_moment2: Option<StateMut<'a>>,
    /// The new p in bf16 or f16, rounded to nearest even; for p of f32.
    pub copy: Option<FloatsMut<'a>>,
    /// Room for the tensors before the step, of their dtypes.
    pub before: Option<AdamBefore<'a>>,
}

/// Room for the tensors of one parameter as they were before a step.
#[derive(Debug)]
pub struct AdamBefore<'a> {
    /// p before the step.
    pub param: FloatsMut<'a>,
    /// m before the step.
    pub moment1: StateMut<'a>,
    /// v before the step.
    pub moment2: StateMut<'a>,
    /// Largest v before the step, present exactly with [`SecondMoment::Largest`].
    pub max_moment2: Option<StateMut<'a>>,
}

impl Adam {
    /// Applies one step to every tensor, whatever dtypes its lists have.
    ///
    /// ```text
    /// m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    /// p ← p·(1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)
    /// ```
    /// Without bias correction 1 − β₁ᵗ and 1 − β₂ᵗ are 1. The arithmetic is that of [`Adam::step`]
    /// in f32, between widening and rounding of what is kept in 16 or 8 bits.
    ///
    /// # Errors
    /// As [`Adam::step`], and [`StepError::Units`], [`StepError::GradFactor`]; everything is
    /// checked before anything is written.
    /// # Cost
    /// 30 bytes of memory traffic per element for masters and state of f32, gradients of f32 and
    /// copies of 16 bits; 28 with gradients of 16 bits.
    pub fn step_mixed(
        &self,
        how: MixedStep<'_>,
        tensors: Vec<MixedAdamTensors<'_>>,
    ) -> Result<(), StepError> {
        self.validate()?;
        check_max_moment2(self.second_moment, &tensors)?;
        match self.second_moment {
            SecondMoment::Running => {
                let tensors = tensors.into_iter().map(|tensor| MixedTensor {
                    step: tensor.step,
                    param: tensor.param,
                    grad: tensor.grad,
                    state: [tensor.moment1, tensor.moment2],
                    copy: tensor.copy,
                    before: tensor.before.map(|before| Before {
                        param: before.param,
                        state: [before.moment1, before.moment2],
                    }),
                });
                step_mixed_slices(self, ["moment1", "moment2"], how, tensors.collect())
            }
            SecondMoment::Largest => {
                let tensors = tensors.into_iter().filter_map(|tensor| {
                    let before = tensor.before.and_then(|before| {
                        let state = [before.moment1, before.moment2, before.max_moment2?];
                        Some(Before { param: before.param, state })
                    });
                    Some(MixedTensor {
                        step: tensor.step,
                        param: tensor.param,
                        grad: tensor.grad,
                        state: [tensor.moment1, tensor.moment2, tensor.max_moment2?],
                        copy: tensor.copy,
                        before,
                    })
                });
                let names = ["moment1", "moment2", "max_moment2"];
                step_mixed_slices(self, names, how, tensors.collect())
            }
        }
    }
}

/// Whether every tensor has a largest second moment, or none has, as the settings ask for.
fn check_max_moment2(
    second_moment: SecondMoment,
    tensors: &[MixedAdamTensors<'_>],
) -> Result<(), StepError> {
    let (expected, found) = match second_moment {
        SecondMoment::Running => ("none, because the second moment is `Running`", "a list"),
        SecondMoment::Largest => ("a list, because the second moment is `Largest`", "none"),
    };
    let wanted = second_moment == SecondMoment::Largest;
    let is_wrong = |tensor: &MixedAdamTensors<'_>| {
        let before = tensor.before.as_ref();
        tensor.max_moment2.is_some() != wanted
            || before.is_some_and(|before| before.max_moment2.is_some() != wanted)
    };
    match tensors.iter().position(is_wrong) {
        Some(tensor) => Err(StepError::List { list: "max_moment2", tensor, expected, found }),
        None => Ok(()),
    }
}
