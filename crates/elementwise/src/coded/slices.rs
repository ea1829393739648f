//! A rule with coded state on plain slices: no plan, no backend.

use fusestep_launch::{GroupValues, check_width};
use fusestep_simd::{Level, Pool, Split};
use fusestep_tensor::DType;
use half::bf16;

use super::coding::{Dither, GROUP};
use super::groups::Grads;
use super::run::{Shared, run_tensor};
use super::tensor::{CodedState, CodedTensor, ParamSlices};
use crate::param_storage::{Plain, WithRemainder8};
use crate::{
    Compute, ElementRule, OwnHyper, StepError, Update, UpdateVisitor, padded_bytes, write_padded,
};

/// Applies one step of `rule` to every tensor, on all threads of `pool` or, without one, in the
/// calling thread. `names` are those of the lists of state, for errors.
///
/// # Units
/// `step` (t) counts from 1; it is the number of the dither, too.
/// # Errors
/// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::NumelMismatch`],
/// [`StepError::Units`]; everything is checked before anything is written.
/// # Panics
/// If the rule's update does not have `N` lists of state, or no codings of them: the crate of the
/// rule knows both.
pub fn step_coded_slices<R, const SCALARS: usize, const STEP_SCALARS: usize, const N: usize>(
    rule: &R,
    step: u64,
    pool: Option<&Pool>,
    names: [&'static str; N],
    tensors: Vec<CodedTensor<'_, N>>,
) -> Result<(), StepError>
where
    R: ElementRule<SCALARS, STEP_SCALARS>,
{
    rule.validate()?;
    check_width(rule, DType::F32)?;
    if step == 0 {
        return Err(StepError::StepZero);
    }
    for (index, tensor) in tensors.iter().enumerate() {
        tensor.check(index, &names)?;
    }
    let OwnHyper { lr_scale, weight_decay, trust } = OwnHyper::default();
    let values = GroupValues { lr: rule.lr(), lr_scale, weight_decay, trust, step };
    let mut step_scalars = vec![0; padded_bytes::<f32>(STEP_SCALARS)];
    write_padded(&rule.step_scalars(values).map(<f32 as Compute>::round), &mut step_scalars);
    let dither = Dither::of_step(step);
    let scalars = rule.scalars().map(<f32 as Compute>::round);
    let call = Call { pool, step_scalars: &step_scalars, dither: &dither, tensors };
    rule.with_update(scalars, call);
    Ok(())
}

/// A step on slices, without the rule's update.
struct Call<'a, 'b, const N: usize> {
    pool: Option<&'b Pool>,
    step_scalars: &'b [u8],
    dither: &'b Dither,
    tensors: Vec<CodedTensor<'a, N>>,
}

impl<const N: usize> UpdateVisitor<f32> for Call<'_, '_, N> {
    type Output = ();

    fn visit<U: Update<f32, M>, const M: usize>(self, update: U) {
        assert_eq!(N, M, "the rule's crate brings every list of its update");
        let tensors = self.tensors.into_iter().map(|tensor| {
            let mut lists = tensor.state.into_iter();
            let state = std::array::from_fn(|_| match lists.next() {
                Some(list) => list,
                None => CodedState { codes: &mut [], units: &mut [] },
            });
            CodedTensor { param: tensor.param, state }
        });
        let shared = Shared {
            update,
            step_scalars: update.step_scalars(self.step_scalars),
            grad_factor: 1.0,
            dither: self.dither,
        };
        let work = Work::<U, M> { level: Level::detect(), shared, tensors: tensors.collect() };
        match self.pool {
            Some(pool) => pool.run(work),
            None => work.run(),
        }
    }
}

struct Work<'a, U: Update<f32, N>, const N: usize> {
    level: Level,
    shared: Shared<'a, U, N>,
    tensors: Vec<CodedTensor<'a, N>>,
}

impl<U: Update<f32, N>, const N: usize> Split for Work<'_, U, N> {
    fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.param.numel() as u64).sum()
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut left, mut right, mut wanted) = (Vec::new(), Vec::new(), elements as usize);
        for tensor in self.tensors {
            let numel = tensor.param.numel();
            // Nothing cuts a group.
            let middle = wanted.next_multiple_of(GROUP);
            wanted -= numel.min(wanted);
            if numel <= middle {
                left.push(tensor);
            } else if middle == 0 {
                right.push(tensor);
            } else {
                let (head, tail) = tensor.split_at(middle);
                left.push(head);
                right.push(tail);
            }
        }
        let Self { level, shared, .. } = self;
        (Self { level, shared, tensors: left }, Self { level, shared, tensors: right })
    }

    fn run(self) {
        let Self { level, shared, tensors } = self;
        for CodedTensor { param, state } in tensors {
            // Without a list beside the parameter, values without bytes.
            let mut none = vec![(); param.numel()];
            match param {
                ParamSlices::F32 { param, grad } => {
                    run_tensor::<Plain<f32>, U, N>(
                        level,
                        shared,
                        param,
                        &mut none,
                        Grads::Own(grad),
                        state,
                    );
                }
                ParamSlices::Bf16 { param, grad } => {
                    run_tensor::<Plain<bf16>, U, N>(
                        level,
                        shared,
                        param,
                        &mut none,
                        Grads::Own(grad),
                        state,
                    );
                }
                ParamSlices::Bf16Remainder8 { param, remainder, grad } => {
                    run_tensor::<WithRemainder8, U, N>(
                        level,
                        shared,
                        param,
                        remainder,
                        Grads::Own(grad),
                        state,
                    );
                }
            }
        }
    }
}
