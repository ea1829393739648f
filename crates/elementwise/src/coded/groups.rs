//! The lists of a tensor in pairs of groups, and its last elements padded to one.

use bytemuck::Zeroable;

use super::coding::{PAIR, units_of};
use super::tensor::CodedState;
use crate::compute::{ParamStorage, Storage};
use crate::parts::outside;

/// The gradients of a tensor: in the type of the parameters, or in f32 beside narrower ones.
///
/// Which of the two is asked once for a pair of groups, so that the loop is compiled once for both.
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

    /// The values of a pair of groups, multiplied by a factor.
    #[inline(always)]
    pub(super) fn pair(self, pair: usize, factor: f32) -> [f32; PAIR] {
        match self {
            Grads::Own(list) => values(list, pair, factor),
            Grads::Wide(list) => values(list, pair, factor),
        }
    }

    /// The list of gradients, to ask for its lines.
    #[inline(always)]
    pub(super) fn prefetch(self, first: usize) {
        match self {
            Grads::Own(list) => super::run::prefetch_pair(list, first),
            Grads::Wide(list) => super::run::prefetch_pair(list, first),
        }
    }
}

#[inline(always)]
fn values<G: Storage<f32>>(list: &[G], pair: usize, factor: f32) -> [f32; PAIR] {
    let Some(pair) = list.as_chunks::<PAIR>().0.get(pair) else { outside() };
    std::array::from_fn(|lane| pair[lane].widen() * factor)
}

/// A tensor's lists in pairs of groups.
pub(super) struct Pairs<'a, K: ParamStorage<f32>, const N: usize> {
    pub(super) param: &'a mut [[K::Param; PAIR]],
    pub(super) master: &'a mut [[K::Master; PAIR]],
    pub(super) grad: Grads<'a, K::Param>,
    pub(super) codes: [&'a mut [[u8; PAIR]]; N],
    pub(super) units: [&'a mut [[f32; 2]]; N],
}

impl<'a, K: ParamStorage<f32>, const N: usize> Pairs<'a, K, N> {
    /// The whole pairs of lists.
    pub(super) fn of(
        param: &'a mut [K::Param],
        master: &'a mut [K::Master],
        grad: Grads<'a, K::Param>,
        state: [CodedState<'a>; N],
    ) -> Self {
        let mut units: [&mut [[f32; 2]]; N] = std::array::from_fn(|_| Default::default());
        let mut places = units.iter_mut();
        let codes = state.map(|list| {
            if let Some(place) = places.next() {
                *place = list.units.as_chunks_mut().0;
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

/// The last elements of a tensor, fewer than two groups, padded with zeros.
pub(super) struct Padded<K: ParamStorage<f32>, const N: usize> {
    param: [[K::Param; PAIR]; 1],
    master: [[K::Master; PAIR]; 1],
    grad: [f32; PAIR],
    codes: [[[u8; PAIR]; 1]; N],
    units: [[[f32; 2]; 1]; N],
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
            param: [[K::Param::zeroed(); PAIR]],
            master: [[K::Master::zeroed(); PAIR]],
            grad: [0.0; PAIR],
            codes: [[[0; PAIR]]; N],
            units: [[[0.0; 2]]; N],
        };
        let numel = param.len();
        padded.param[0][..numel].copy_from_slice(param);
        padded.master[0][..numel].copy_from_slice(master);
        let places = padded.grad[..numel].iter_mut();
        match grad {
            Grads::Own(list) => places.zip(list).for_each(|(to, from)| *to = from.widen()),
            Grads::Wide(list) => places.zip(list).for_each(|(to, from)| *to = *from),
        }
        let units = units_of(numel);
        for (at, list) in state.iter().enumerate() {
            padded.codes[at][0][..numel].copy_from_slice(list.codes);
            padded.units[at][0][..units].copy_from_slice(list.units);
        }
        padded
    }

    pub(super) fn pairs(&mut self) -> Pairs<'_, K, N> {
        Pairs {
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
            list.units.copy_from_slice(&self.units[at][0][..units_of(numel)]);
        }
    }
}
