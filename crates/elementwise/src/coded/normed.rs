//! A rule with norms and coded state on plain slices: no plan, no backend.

use fusestep_launch::{Master, Outcome, Precision, StateDType, UpdateRule};
use fusestep_simd::Pool;
use fusestep_tensor::DType;

use super::tensor::{CodedTensor, ParamSlices};
use crate::slices::Prepared;
use crate::{OwnHyper, StepError, step_tensor};

/// The slices of one parameter, and its own hyper-parameters.
#[derive(Debug)]
pub struct NormedCodedTensor<'a, const N: usize> {
    /// The slices.
    pub slices: CodedTensor<'a, N>,
    /// Hyper-parameters of this tensor alone.
    pub own: OwnHyper,
}

/// Applies one step of a rule with norms to every tensor, on all threads of `pool` or, without one,
/// in the calling thread. `names` are those of the lists of state, for errors. Returns the
/// positions of tensors that stay as they are because a norm or the rate is not finite.
///
/// # Units
/// `step` (t) counts from 1; it is the number of the dither, too.
/// # Errors
/// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`],
/// [`StepError::Units`], [`StepError::OwnHyper`]; everything is checked before anything is written.
/// # Cost
/// A kernel for each way to keep parameters, and what the step itself takes.
pub fn step_coded_normed_slices<const N: usize>(
    rule: &dyn UpdateRule,
    step: u64,
    pool: Option<&Pool>,
    names: [&'static str; N],
    tensors: Vec<NormedCodedTensor<'_, N>>,
) -> Result<Vec<usize>, StepError> {
    let prepare = |dtype, master| {
        let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
        Prepared::of(rule, step, dtype, precision)
    };
    let of_f32 = prepare(DType::F32, Master::None)?;
    let of_bf16 = prepare(DType::BF16, Master::None)?;
    let with_remainder = prepare(DType::BF16, Master::Remainder8)?;
    for (index, tensor) in tensors.iter().enumerate() {
        tensor.slices.check(index, &names)?;
        tensor.own.check(index)?;
    }
    let mut skipped = Vec::new();
    for (index, NormedCodedTensor { slices, own }) in tensors.into_iter().enumerate() {
        let prepared = match slices.param {
            ParamSlices::F32 { .. } => &of_f32,
            ParamSlices::Bf16 { .. } => &of_bf16,
            ParamSlices::Bf16Remainder8 { .. } => &with_remainder,
        };
        let (step_scalars, numel) = (prepared.step_scalars(own), slices.param.numel());
        let tensor = prepared.tensor(&step_scalars, numel, slices.into_lists());
        if step_tensor(tensor, pool) == Outcome::Skip {
            skipped.push(index);
        }
    }
    Ok(skipped)
}
