//! The slices of one parameter whose state is coded.

use bytemuck::{cast_slice, cast_slice_mut};
use fusestep_launch::{HostList, MAX_LISTS};
use half::bf16;

use super::coding::{GROUP, units_of};
use crate::StepError;
use crate::parts::outside;

/// A list of coded state of one tensor.
#[derive(Debug)]
pub struct CodedState<'a> {
    /// A code for each element; zeros before step 1.
    pub codes: &'a mut [u8],
    /// A unit for each 32 elements, [`units_of`] in all; zeros before step 1.
    pub units: &'a mut [f32],
}

impl<'a> CodedState<'a> {
    /// The list for as long as it is borrowed.
    pub fn reborrow(&mut self) -> CodedState<'_> {
        CodedState { codes: self.codes, units: self.units }
    }

    /// The elements before `middle`, a multiple of [`GROUP`], and those from there on.
    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let (codes, codes_rest) = self.codes.split_at_mut(middle);
        let (units, units_rest) = self.units.split_at_mut(middle / GROUP);
        (CodedState { codes, units }, CodedState { codes: codes_rest, units: units_rest })
    }
}

/// First and second of all pairs.
pub(super) fn unzip<T, const N: usize>(pairs: [(T, T); N]) -> ([T; N], [T; N]) {
    let mut pairs = pairs.map(|(first, second)| (Some(first), Some(second)));
    let taken = |value: Option<T>| match value {
        Some(value) => value,
        None => outside(),
    };
    let first = std::array::from_fn(|at| taken(pairs[at].0.take()));
    (first, std::array::from_fn(|at| taken(pairs[at].1.take())))
}

/// A parameter and its gradient, by how the parameter is kept; all slices have the same numel.
#[derive(Debug)]
pub enum ParamSlices<'a> {
    /// Parameters of f32.
    F32 {
        /// p, updated in place.
        param: &'a mut [f32],
        /// g, only read.
        grad: &'a [f32],
    },
    /// Parameters of bf16, rounded to nearest even. An update below 2⁻⁹ of a parameter is lost.
    Bf16 {
        /// p, updated in place.
        param: &'a mut [bf16],
        /// g, only read.
        grad: &'a [bf16],
    },
    /// Parameters of bf16 with a byte of remainder: together the upper 24 bits of an f32. An update
    /// below 2⁻¹⁷ of a parameter is lost.
    Bf16Remainder8 {
        /// p, updated in place.
        param: &'a mut [bf16],
        /// The bits below p as a signed byte, updated in place; zeros if p is all there is.
        remainder: &'a mut [i8],
        /// g, only read.
        grad: &'a [bf16],
    },
}

impl ParamSlices<'_> {
    /// The element count of the parameter.
    pub fn numel(&self) -> usize {
        match self {
            ParamSlices::F32 { param, .. } => param.len(),
            ParamSlices::Bf16 { param, .. } | ParamSlices::Bf16Remainder8 { param, .. } => {
                param.len()
            }
        }
    }

    /// Names and element counts of the other lists.
    fn others(&self) -> [(&'static str, usize); 2] {
        match self {
            ParamSlices::F32 { grad, .. } => [("grad", grad.len()); 2],
            ParamSlices::Bf16 { grad, .. } => [("grad", grad.len()); 2],
            ParamSlices::Bf16Remainder8 { remainder, grad, .. } => {
                [("grad", grad.len()), ("remainder", remainder.len())]
            }
        }
    }

    /// The slices for as long as they are borrowed.
    pub fn reborrow(&mut self) -> ParamSlices<'_> {
        match self {
            ParamSlices::F32 { param, grad } => ParamSlices::F32 { param, grad },
            ParamSlices::Bf16 { param, grad } => ParamSlices::Bf16 { param, grad },
            ParamSlices::Bf16Remainder8 { param, remainder, grad } => {
                ParamSlices::Bf16Remainder8 { param, remainder, grad }
            }
        }
    }
}

impl<'a> ParamSlices<'a> {
    fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            ParamSlices::F32 { param, grad } => {
                let (param, param_rest) = param.split_at_mut(middle);
                let (grad, grad_rest) = grad.split_at(middle);
                let rest = ParamSlices::F32 { param: param_rest, grad: grad_rest };
                (ParamSlices::F32 { param, grad }, rest)
            }
            ParamSlices::Bf16 { param, grad } => {
                let (param, param_rest) = param.split_at_mut(middle);
                let (grad, grad_rest) = grad.split_at(middle);
                let rest = ParamSlices::Bf16 { param: param_rest, grad: grad_rest };
                (ParamSlices::Bf16 { param, grad }, rest)
            }
            ParamSlices::Bf16Remainder8 { param, remainder, grad } => {
                let (param, param_rest) = param.split_at_mut(middle);
                let (remainder, remainder_rest) = remainder.split_at_mut(middle);
                let (grad, grad_rest) = grad.split_at(middle);
                let rest = ParamSlices::Bf16Remainder8 {
                    param: param_rest,
                    remainder: remainder_rest,
                    grad: grad_rest,
                };
                (ParamSlices::Bf16Remainder8 { param, remainder, grad }, rest)
            }
        }
    }
}

/// The slices of one parameter, with `N` lists of coded state in the order of the kernel's.
#[derive(Debug)]
pub struct CodedTensor<'a, const N: usize> {
    /// The parameter and its gradient.
    pub param: ParamSlices<'a>,
    /// The optimizer's own lists, updated in place.
    pub state: [CodedState<'a>; N],
}

impl<'a, const N: usize> CodedTensor<'a, N> {
    /// The elements before `middle`, a multiple of [`GROUP`], and those from there on.
    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let (param, param_rest) = self.param.split_at(middle);
        let (state, rest) = unzip(self.state.map(|list| list.split_at(middle)));
        (Self { param, state }, Self { param: param_rest, state: rest })
    }

    /// The lists as a kernel of a format with `N` roles of state declares them.
    pub(super) fn into_lists(self) -> [HostList<'a>; MAX_LISTS] {
        let mut lists: [HostList<'a>; MAX_LISTS] = Default::default();
        for (at, state) in self.state.into_iter().enumerate() {
            lists[2 + at] = HostList::ReadWrite(state.codes);
            lists[2 + N + at] = HostList::ReadWrite(cast_slice_mut(state.units));
        }
        match self.param {
            ParamSlices::F32 { param, grad } => {
                lists[0] = HostList::ReadWrite(cast_slice_mut(param));
                lists[1] = HostList::Read(cast_slice(grad));
            }
            ParamSlices::Bf16 { param, grad } => {
                lists[0] = HostList::ReadWrite(cast_slice_mut(param));
                lists[1] = HostList::Read(cast_slice(grad));
            }
            ParamSlices::Bf16Remainder8 { param, remainder, grad } => {
                lists[0] = HostList::ReadWrite(cast_slice_mut(param));
                lists[1] = HostList::Read(cast_slice(grad));
                lists[2 + 2 * N] = HostList::ReadWrite(cast_slice_mut(remainder));
            }
        }
        lists
    }

    /// Whether every list is as long as its parameter; `index` and `names` are for the error.
    pub(super) fn check(&self, index: usize, names: &[&'static str; N]) -> Result<(), StepError> {
        let expected = self.param.numel();
        let own = self.param.others().into_iter();
        let codes = names.iter().zip(&self.state).map(|(name, list)| (*name, list.codes.len()));
        for (list, found) in own.chain(codes) {
            if found != expected {
                return Err(StepError::NumelMismatch { list, tensor: index, expected, found });
            }
        }
        let expected = units_of(expected);
        for (&list, state) in names.iter().zip(&self.state) {
            let found = state.units.len();
            if found != expected {
                return Err(StepError::Units { list, tensor: index, expected, found });
            }
        }
        Ok(())
    }
}
