//! The lists of one parameter, and whether they fit each other.

use fusestep_tensor::DType;

use super::lists::{Floats, FloatsMut, StateMut};
use crate::StepError;
use crate::parts::outside;

/// The lists of one parameter, with `N` lists of state in the order of the kernel's; all have the
/// same numel, 0 allowed.
#[derive(Debug)]
pub struct MixedTensor<'a, const N: usize> {
    /// Number of this step, from 1 on.
    pub step: u64,
    /// p, updated in place.
    pub param: FloatsMut<'a>,
    /// g, only read; of any dtype, whatever the parameter's is.
    pub grad: Floats<'a>,
    /// The optimizer's own lists, updated in place, all of one dtype.
    pub state: [StateMut<'a>; N],
    /// The new parameter in bf16 or f16, rounded to nearest even; for parameters of f32.
    pub copy: Option<FloatsMut<'a>>,
    /// Room for parameter and state as they were before the step.
    pub before: Option<Before<'a, N>>,
}

/// Room for a tensor as it was before a step; each list has the dtype of its original.
#[derive(Debug)]
pub struct Before<'a, const N: usize> {
    /// p before the step.
    pub param: FloatsMut<'a>,
    /// The optimizer's own lists before the step.
    pub state: [StateMut<'a>; N],
}

impl<'a, const N: usize> MixedTensor<'a, N> {
    /// Whether every list fits its parameter; `index` and `names` are for the error.
    pub(super) fn check(&self, index: usize, names: &[&'static str; N]) -> Result<(), StepError> {
        if self.step == 0 {
            return Err(StepError::StepZero);
        }
        let list = |list, expected, found: DType| StepError::List {
            list,
            tensor: index,
            expected,
            found: found.name(),
        };
        if let Some(copy) = &self.copy {
            let (own, dtype) = (self.param.dtype(), copy.dtype());
            if own != DType::F32 {
                return Err(list("copy", "none, since the parameter is not f32", dtype));
            }
            if dtype == DType::F32 {
                return Err(list("copy", "bf16 or f16", dtype));
            }
        }
        let state = self.state.first().map_or(DType::F32, StateMut::dtype);
        if let Some(at) = self.state.iter().position(|own| own.dtype() != state) {
            return Err(list(names[at], state.name(), self.state[at].dtype()));
        }
        let numel = |list, expected, found| {
            if expected == found {
                return Ok(());
            }
            Err(StepError::NumelMismatch { list, tensor: index, expected, found })
        };
        let expected = self.param.numel();
        numel("grad", expected, self.grad.numel())?;
        for (name, own) in names.iter().zip(&self.state) {
            numel(name, expected, own.numel())?;
            let units = own.units();
            if units.needed != units.found {
                let (expected, found) = (units.needed, units.found);
                return Err(StepError::Units { list: name, tensor: index, expected, found });
            }
        }
        if let Some(copy) = &self.copy {
            numel("copy", expected, copy.numel())?;
        }
        let Some(before) = &self.before else {
            return Ok(());
        };
        numel("param before", expected, before.param.numel())?;
        if before.param.dtype() != self.param.dtype() {
            let expected = self.param.dtype().name();
            return Err(list("param before", expected, before.param.dtype()));
        }
        for (name, (own, before)) in names.iter().zip(self.state.iter().zip(&before.state)) {
            numel(name, expected, before.numel())?;
            if before.dtype() != own.dtype() {
                return Err(list(name, own.dtype().name(), before.dtype()));
            }
            let (expected, found) = (own.units().needed, before.units().found);
            if expected != found {
                return Err(StepError::Units { list: name, tensor: index, expected, found });
            }
        }
        Ok(())
    }

    /// The elements before `middle`, a multiple of [`GROUP`], and those from there on.
    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let step = self.step;
        let (param, param_rest) = self.param.split_at(middle);
        let (grad, grad_rest) = self.grad.split_at(middle);
        let (state, state_rest) = split_all(self.state, middle);
        let (copy, copy_rest) = self.copy.map(|copy| copy.split_at(middle)).unzip();
        let (before, before_rest) = self.before.map(|before| before.split_at(middle)).unzip();
        let rest = Self {
            step,
            param: param_rest,
            grad: grad_rest,
            state: state_rest,
            copy: copy_rest,
            before: before_rest,
        };
        (Self { step, param, grad, state, copy, before }, rest)
    }
}

impl<const N: usize> Before<'_, N> {
    fn split_at(self, middle: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at(middle);
        let (state, state_rest) = split_all(self.state, middle);
        (Self { param, state }, Self { param: param_rest, state: state_rest })
    }
}

/// Cuts all lists of state.
fn split_all<'a, const N: usize>(
    state: [StateMut<'a>; N],
    middle: usize,
) -> ([StateMut<'a>; N], [StateMut<'a>; N]) {
    let mut rest: [Option<StateMut<'a>>; N] = std::array::from_fn(|_| None);
    let mut places = rest.iter_mut();
    let first = state.map(|list| {
        let (list, behind) = list.split_at(middle);
        if let Some(place) = places.next() {
            *place = Some(behind);
        }
        list
    });
    let taken = |list: Option<StateMut<'a>>| match list {
        Some(list) => list,
        None => outside(),
    };
    (first, rest.map(taken))
}
