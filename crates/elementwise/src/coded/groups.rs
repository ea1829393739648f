//! The lists of a tensor in whole groups, and its last elements padded to one.

use bytemuck::Zeroable;

use super::coding::GROUP;
use super::tensor::CodedState;
use crate::compute::{ParamStorage, Storage};
use crate::parts::outside;

/// The gradients of a tensor: in the type of the parameters, or in f32 beside narrower ones.
///
/// Which of the two is asked once for a group, so that the loop over groups is compiled once for
/// both.
#[derive(Clone, Copy, Debug)]
pub(super) enum Grads<'a, P> {
    /// Gradients in the type of the parameters.
    Own(&'a [P]),
    /// Gradients of f32.
    Wide(&'a [f32]),
}

impl<'a, P: Storage<f32>> Grads<'a, P> {
    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Grads::Own(list) => {
                let (list, rest) = list.split_at(middle);
                (Grads::Own(list), Grads::Own(rest))
            }
            Grads::Wide(list) => {
                let (list, rest) = list.split_at(middle);
                (Grads::Wide(list), Grads::Wide(rest))
            }
        }
    }

    /// The values of a group, multiplied by a factor.
    #[inline(always)]
    fn group(self, group: usize, factor: f32) -> [f32; GROUP] {
        match self {
            Grads::Own(list) => values(list, group, factor),
            Grads::Wide(list) => values(list, group, factor),
        }
    }

    /// The list of gradients, to ask for its lines.
    #[inline(always)]
    pub(super) fn prefetch(self, first: usize) {
        match self {
            Grads::Own(list) => super::run::prefetch_group(list, first),
            Grads::Wide(list) => super::run::prefetch_group(list, first),
        }
    }
}

#[inline(always)]
fn values<G: Storage<f32>>(list: &[G], group: usize, factor: f32) -> [f32; GROUP] {
    let Some(group) = list.as_chunks::<GROUP>().0.get(group) else { outside() };
    std::array::from_fn(|lane| group[lane].widen() * factor)
}

/// A tensor's lists in whole groups.
pub(super) struct Groups<'a, K: ParamStorage<f32>, const N: usize> {
    pub(super) param: &'a mut [[K::Param; GROUP]],
    pub(super) master: &'a mut [[K::Master; GROUP]],
    pub(super) grad: Grads<'a, K::Param>,
    pub(super) codes: [&'a mut [[u8; GROUP]]; N],
    pub(super) units: [&'a mut [f32]; N],
}

impl<'a, K: ParamStorage<f32>, const N: usize> Groups<'a, K, N> {
    /// The gradients of a group, multiplied by a factor.
    #[inline(always)]
    pub(super) fn grads(&self, group: usize, factor: f32) -> [f32; GROUP] {
        self.grad.group(group, factor)
    }

    /// The whole groups of lists.
    pub(super) fn of(
        param: &'a mut [K::Param],
        master: &'a mut [K::Master],
        grad: Grads<'a, K::Param>,
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
            grad,
            codes,
            units,
        }
    }
}

/// The last elements of a tensor, fewer than a group, padded with zeros.
pub(super) struct Padded<K: ParamStorage<f32>, const N: usize> {
    param: [[K::Param; GROUP]; 1],
    master: [[K::Master; GROUP]; 1],
    grad: [f32; GROUP],
    codes: [[[u8; GROUP]; 1]; N],
    units: [[f32; 1]; N],
}

impl<K: ParamStorage<f32>, const N: usize> Padded<K, N> {
    /// A copy of the lists.
    #[inline(never)]
    pub(super) fn of(
        param: &[K::Param],
        master: &[K::Master],
        grad: Grads<'_, K::Param>,
        state: &[CodedState<'_>; N],
    ) -> Self {
        let mut padded = Self {
            param: [[K::Param::zeroed(); GROUP]],
            master: [[K::Master::zeroed(); GROUP]],
            grad: [0.0; GROUP],
            codes: [[[0; GROUP]]; N],
            units: [[0.0]; N],
        };
        let numel = param.len();
        padded.param[0][..numel].copy_from_slice(param);
        padded.master[0][..numel].copy_from_slice(master);
        let places = padded.grad[..numel].iter_mut();
        match grad {
            Grads::Own(list) => places.zip(list).for_each(|(to, from)| *to = from.widen()),
            Grads::Wide(list) => places.zip(list).for_each(|(to, from)| *to = *from),
        }
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
            grad: Grads::Wide(&self.grad),
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
