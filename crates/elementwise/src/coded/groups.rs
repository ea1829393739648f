//! The lists of a tensor in whole groups, and its last elements padded to one.

use bytemuck::Zeroable;

use super::coding::GROUP;
use super::tensor::CodedState;
use crate::compute::ParamStorage;

/// A tensor's lists in whole groups.
pub(super) struct Groups<'a, K: ParamStorage<f32>, const N: usize> {
    pub(super) param: &'a mut [[K::Param; GROUP]],
    pub(super) master: &'a mut [[K::Master; GROUP]],
    pub(super) grad: &'a [[K::Param; GROUP]],
    pub(super) codes: [&'a mut [[u8; GROUP]]; N],
    pub(super) units: [&'a mut [f32]; N],
}

impl<'a, K: ParamStorage<f32>, const N: usize> Groups<'a, K, N> {
    /// The whole groups of lists.
    pub(super) fn of(
        param: &'a mut [K::Param],
        master: &'a mut [K::Master],
        grad: &'a [K::Param],
        state: [CodedState<'a>; N],
    ) -> Self {
        let mut units: [&mut [f32]; N] = std::array::from_fn(|_| Default::default());
        let mut places = units.iter_mut();
        let codes = state.map(|list| {
            if let Some(place) = places.next() {
                *place = list.units;
            }
            list.codes.as_chunks_mut().0
        });
        Self {
            param: param.as_chunks_mut().0,
            master: master.as_chunks_mut().0,
            grad: grad.as_chunks().0,
            codes,
            units,
        }
    }
}

/// The last elements of a tensor, fewer than a group, padded with zeros.
pub(super) struct Padded<K: ParamStorage<f32>, const N: usize> {
    param: [[K::Param; GROUP]; 1],
    master: [[K::Master; GROUP]; 1],
    grad: [[K::Param; GROUP]; 1],
    codes: [[[u8; GROUP]; 1]; N],
    units: [[f32; 1]; N],
}

impl<K: ParamStorage<f32>, const N: usize> Padded<K, N> {
    /// A copy of the lists.
    #[inline(never)]
    pub(super) fn of(
        param: &[K::Param],
        master: &[K::Master],
        grad: &[K::Param],
        state: &[CodedState<'_>; N],
    ) -> Self {
        let mut padded = Self {
            param: [[K::Param::zeroed(); GROUP]],
            master: [[K::Master::zeroed(); GROUP]],
            grad: [[K::Param::zeroed(); GROUP]],
            codes: [[[0; GROUP]]; N],
            units: [[0.0]; N],
        };
        let numel = param.len();
        padded.param[0][..numel].copy_from_slice(param);
        padded.master[0][..numel].copy_from_slice(master);
        padded.grad[0][..numel].copy_from_slice(grad);
        for (at, list) in state.iter().enumerate() {
            padded.codes[at][0][..numel].copy_from_slice(list.codes);
            padded.units[at][..list.units.len()].copy_from_slice(list.units);
        }
        padded
    }

    pub(super) fn groups(&mut self) -> Groups<'_, K, N> {
        Groups {
            param: &mut self.param,
            master: &mut self.master,
            grad: &self.grad,
            codes: self.codes.each_mut().map(|codes| &mut codes[..]),
            units: self.units.each_mut().map(|units| &mut units[..]),
        }
    }

    /// Puts the elements back where [`Self::of`] has them from.
    #[inline(never)]
    pub(super) fn put(
        &self,
        param: &mut [K::Param],
        master: &mut [K::Master],
        state: &mut [CodedState<'_>; N],
    ) {
        let numel = param.len();
        param.copy_from_slice(&self.param[0][..numel]);
        master.copy_from_slice(&self.master[0][..numel]);
        for (at, list) in state.iter_mut().enumerate() {
            list.codes.copy_from_slice(&self.codes[at][0][..numel]);
            let units = list.units.len();
            list.units.copy_from_slice(&self.units[at][..units]);
        }
    }
}
