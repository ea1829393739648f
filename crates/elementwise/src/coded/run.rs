//! The loop of element-wise updates over coded state.
//!
//! The plain version takes a group at a time: decode, update, find the largest, encode. That is one
//! chain of a root, a division, a maximum and another division, longer than what a processor looks
//! ahead. So it is cut into three stages, and a turn of the loop does each for another group:
//! updates of group i, units of group i − 1, codes of group i − 2. Values wait in memory between
//! the stages (`benches/coded.rs`).

use bytemuck::Pod;
use fusestep_simd::{Codec, CodedWork, Level, prefetch_ahead};

use super::coding::{Coding, Dither, GROUP};
use super::groups::{Grads, Groups, Padded};
use super::storage::GroupStorage;
use super::tensor::{CodedState, unzip};
use crate::Update;
use crate::parts::outside;

/// Elements between a group and the lines that are asked for.
const AHEAD: usize = 1024;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Elements of a block within a group.
const BLOCK: usize = 16;

/// Turns of the loop between the first stage of a group and its last.
const STAGES_BEHIND: usize = 2;

/// Groups whose values wait between stages, rounded up to a power of two.
const WAITING: usize = 4;

/// An update and what it shares between tensors.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a, U: Update<f32, N>, const N: usize> {
    pub(super) update: U,
    pub(super) step_scalars: U::StepScalars,
    pub(super) grad_factor: f32,
    pub(super) dither: &'a Dither,
}

/// Updates one tensor, whose lists are all of one numel.
pub(super) fn run_tensor<K, U, const N: usize>(
    level: Level,
    shared: Shared<'_, U, N>,
    param: &mut [K::Param],
    master: &mut [K::Master],
    grad: Grads<'_, K::Param>,
    state: [CodedState<'_>; N],
) where
    K: GroupStorage,
    U: Update<f32, N>,
{
    let whole = param.len() / GROUP * GROUP;
    let (param, param_rest) = param.split_at_mut(whole);
    let (master, master_rest) = master.split_at_mut(whole);
    let (grad, grad_rest) = grad.split_at(whole);
    let (state, mut state_rest) = unzip(state.map(|list| list.split_at(whole)));
    let mut padded = Padded::<K, N>::of(param_rest, master_rest, grad_rest, &state_rest);
    let live = param_rest.len();
    let rest = (live > 0).then(|| Rest { groups: padded.groups(), live });
    let groups = Groups::of(param, master, grad, state);
    level.run_coded(TensorRun { shared, groups, rest });
    padded.put(param_rest, master_rest, &mut state_rest);
}

/// The update of one tensor, to be compiled for each level.
struct TensorRun<'a, K: GroupStorage, U: Update<f32, N>, const N: usize> {
    shared: Shared<'a, U, N>,
    /// Whole groups.
    groups: Groups<'a, K, N>,
    /// The elements behind them.
    rest: Option<Rest<'a, K, N>>,
}

/// A group of which the first `live` elements are the tensor's.
struct Rest<'a, K: GroupStorage, const N: usize> {
    groups: Groups<'a, K, N>,
    live: usize,
}

/// Values of a group between two stages: state whose roots are taken where roots are coded.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Between<const N: usize> {
    values: [[f32; GROUP]; N],
    factors: [f32; N],
}

impl<K, U, const N: usize> CodedWork for TensorRun<'_, K, U, N>
where
    K: GroupStorage,
    U: Update<f32, N>,
{
    type Output = ();

    #[inline(always)]
    fn run<C: Codec>(self, codec: C) {
        let Self { shared, groups, mut rest } = self;
        let (mut groups, mut live) = (groups, GROUP);
        // Twice through one loop, so that the code of a group is compiled once.
        loop {
            groups.update_all(codec, shared, live);
            match rest.take() {
                Some(rest) => (groups, live) = (rest.groups, rest.live),
                None => return,
            }
        }
    }
}

impl<K: GroupStorage, const N: usize> Groups<'_, K, N> {
    /// Takes all groups through the three stages; the first `live` elements of each count.
    #[inline(always)]
    fn update_all<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: Shared<'_, U, N>,
        live: usize,
    ) {
        let codings = codings::<U, N>();
        let count = self.param.len();
        let none = Between { values: [[0.0; GROUP]; N], factors: [0.0; N] };
        let mut between = [none; WAITING];
        for turn in 0..count + STAGES_BEHIND {
            if turn < count {
                self.prefetch(turn);
                self.update(codec, &shared, turn, &mut between[turn % WAITING]);
            }
            if turn >= 1 && turn <= count {
                let group = turn - 1;
                let between = &mut between[group % WAITING];
                let units = measure(codec, codings, between, live);
                for (list, unit) in self.units.iter_mut().zip(units) {
                    *at_mut(list, group) = unit;
                }
            }
            if turn >= STAGES_BEHIND {
                let group = turn - STAGES_BEHIND;
                let between = &between[group % WAITING];
                for (list, coding) in codings.into_iter().enumerate() {
                    let codes = at_mut(self.codes[list], group);
                    let (values, factor) = (&between.values[list], between.factors[list]);
                    encode_group(codec, coding, values, factor, shared.dither, codes);
                }
                if U::FOLLOWS {
                    self.follow(codec, &shared, group, between);
                }
            }
        }
    }

    /// Updates the parameters of a group and leaves its state.
    #[inline(always)]
    fn update<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: &Shared<'_, U, N>,
        group: usize,
        between: &mut Between<N>,
    ) {
        let codings = codings::<U, N>();
        // Copies, so that no store is taken to change what is read behind it.
        let codes: [[u8; GROUP]; N] = std::array::from_fn(|list| *at(self.codes[list], group));
        let units: [f32; N] = std::array::from_fn(|list| *at(self.units[list], group));
        let mut params = self.widen(codec, group);
        let all_grads = self.grads(group, shared.grad_factor);
        let mut signed = [[0.0; GROUP]; N];
        for list in 0..N {
            if codings[list] == Coding::Signed {
                codec.decode_signed(&codes[list], &mut signed[list]);
            }
        }
        for first in (0..GROUP).step_by(BLOCK) {
            // One loop for each list, each on arrays of one width.
            let mut values = block(&params, first);
            let grads = block(&all_grads, first);
            let mut states = [[0.0; BLOCK]; N];
            for (list, values) in states.iter_mut().enumerate() {
                for (lane, value) in values.iter_mut().enumerate() {
                    let at = first + lane;
                    *value = match codings[list] {
                        Coding::Signed => signed[list][at] * units[list],
                        Coding::Positive => f32::from(codes[list][at]) * units[list],
                        Coding::Root => {
                            let root = f32::from(codes[list][at]) * units[list];
                            root * root
                        }
                    };
                }
            }
            for lane in 0..BLOCK {
                let old: [f32; N] = std::array::from_fn(|list| states[list][lane]);
                let (scalars, value, grad) = (&shared.step_scalars, values[lane], grads[lane]);
                let new;
                (values[lane], new) = shared.update.element(scalars, value, grad, old);
                for list in 0..N {
                    states[list][lane] = match codings[list] {
                        Coding::Root => new[list].sqrt(),
                        Coding::Signed | Coding::Positive => new[list],
                    };
                }
            }
            for (waiting, values) in between.values.iter_mut().zip(&states) {
                waiting[first..first + BLOCK].copy_from_slice(values);
            }
            params[first..first + BLOCK].copy_from_slice(&values);
        }
        if !U::FOLLOWS {
            self.narrow(codec, group, &params);
        }
    }

    /// Updates the parameters of a group from its new state.
    #[inline(always)]
    fn follow<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: &Shared<'_, U, N>,
        group: usize,
        between: &Between<N>,
    ) {
        let mut params = self.widen(codec, group);
        for (lane, param) in params.iter_mut().enumerate() {
            let state = std::array::from_fn(|list| between.values[list][lane]);
            *param = shared.update.follow(&shared.step_scalars, *param, state);
        }
        self.narrow(codec, group, &params);
    }

    /// Values of the parameters of a group.
    #[inline(always)]
    fn widen<C: Codec>(&self, codec: C, group: usize) -> [f32; GROUP] {
        K::widen_group(codec, at(self.param, group), at(self.master, group))
    }

    /// Writes the parameters of a group.
    #[inline(always)]
    fn narrow<C: Codec>(&mut self, codec: C, group: usize, values: &[f32; GROUP]) {
        let (param, master) = (at_mut(self.param, group), at_mut(self.master, group));
        K::narrow_group(codec, values, param, master);
    }

    /// Asks for the lines of a group [`AHEAD`] elements ahead.
    #[inline(always)]
    fn prefetch(&self, group: usize) {
        let ahead = group * GROUP + AHEAD;
        prefetch_group(self.param.as_flattened(), ahead);
        self.grad.prefetch(ahead);
        // A line of bytes has two groups.
        if group.is_multiple_of(2) {
            prefetch_group(self.master.as_flattened(), ahead);
            for codes in &self.codes {
                prefetch_group(codes.as_flattened(), ahead);
            }
        }
    }
}

/// Asks for the lines of the group that begins with an element.
#[inline(always)]
pub(super) fn prefetch_group<T>(list: &[T], element: usize) {
    let bytes = GROUP * size_of::<T>();
    let mut line = 0;
    while line * LINE_BYTES < bytes {
        // Not reached for elements without bytes, which divide by 0.
        prefetch_ahead(list, element + line * LINE_BYTES / size_of::<T>());
        line += 1;
    }
}

/// The codings of an update's state.
#[inline(always)]
fn codings<U: Update<f32, N>, const N: usize>() -> [Coding; N] {
    match U::CODINGS {
        Some(codings) => codings,
        None => panic!("expected a rule whose state can be coded"),
    }
}

/// Finds units of a group and keeps its factors.
#[inline(always)]
fn measure<C: Codec, const N: usize>(
    codec: C,
    codings: [Coding; N],
    between: &mut Between<N>,
    live: usize,
) -> [f32; N] {
    if live < GROUP {
        for values in &mut between.values {
            values[live..].fill(0.0);
        }
    }
    let mut units = [0.0; N];
    // Two lists at a time share a tree of maxima; the last may go with itself.
    let mut list = 0;
    while list < N {
        let pair = [list, if list + 1 < N { list + 1 } else { list }];
        let values = pair.map(|list| &between.values[list]);
        let largest = codec.largest(values);
        for (list, largest) in pair.into_iter().zip(largest) {
            units[list] = codings[list].unit(largest);
            between.factors[list] = codings[list].factor(largest);
        }
        list += 2;
    }
    units
}

/// Codes of a group of values, or of their roots.
#[inline(always)]
pub(super) fn encode_group<C: Codec>(
    codec: C,
    coding: Coding,
    values: &[f32; GROUP],
    factor: f32,
    dither: &Dither,
    codes: &mut [u8; GROUP],
) {
    match coding {
        Coding::Signed => codec.encode_signed(values, factor, codes),
        Coding::Root | Coding::Positive => {
            codec.encode_positive(values, factor, &dither.lanes, codes)
        }
    }
}

/// The elements of a block.
#[inline(always)]
fn block<T: Pod>(group: &[T; GROUP], first: usize) -> [T; BLOCK] {
    let mut block = [T::zeroed(); BLOCK];
    block.copy_from_slice(&group[first..first + BLOCK]);
    block
}

#[inline(always)]
fn at<T>(list: &[T], group: usize) -> &T {
    match list.get(group) {
        Some(group) => group,
        None => outside(),
    }
}

#[inline(always)]
fn at_mut<T>(list: &mut [T], group: usize) -> &mut T {
    match list.get_mut(group) {
        Some(group) => group,
        None => outside(),
    }
}
