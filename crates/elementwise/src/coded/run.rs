//! The loop of element-wise updates over coded state.
//!
//! The plain version takes a group at a time: decode, update, find the largest, encode. That is one
//! chain of a root, a division, a maximum and another division, longer than what a processor looks
//! ahead. So it is cut into three stages, and a turn of the loop does each for another pair of
//! groups: updates of pair i, units of pair i − 1, codes of pair i − 2. Values wait in memory
//! between the stages. Two groups share a tree of maxima, a division and the packing of their
//! codes: a tenth less time on AVX-512 than a group at a time (`benches/coded.rs`).

use bytemuck::Pod;
use fusestep_simd::{Codec, CodedWork, Level, prefetch_ahead};

use super::coding::{Coding, Dither, GROUP, PAIR};
use super::groups::{Grads, Padded, Pairs};
use super::storage::GroupStorage;
use super::tensor::{CodedState, unzip};
use crate::Update;
use crate::parts::outside;

/// Elements between a pair and the lines that are asked for.
const AHEAD: usize = 1024;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Elements of a block. They are of one group, so that their units are one value.
const BLOCK: usize = 16;

const _: () = assert!(PAIR == 4 * BLOCK, "an update takes four blocks");

/// Turns of the loop between the first stage of a pair and its last.
const STAGES_BEHIND: usize = 2;

/// Pairs whose values wait between stages, rounded up to a power of two.
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
    let whole = param.len() / PAIR * PAIR;
    let (param, param_rest) = param.split_at_mut(whole);
    let (master, master_rest) = master.split_at_mut(whole);
    let (grad, grad_rest) = grad.split_at(whole);
    let (state, mut state_rest) = unzip(state.map(|list| list.split_at(whole)));
    let mut padded = Padded::<K, N>::of(param_rest, master_rest, grad_rest, &state_rest);
    let live = param_rest.len();
    let rest = (live > 0).then(|| Rest { pairs: padded.pairs(), live });
    let pairs = Pairs::of(param, master, grad, state);
    level.run_coded(TensorRun { shared, pairs, rest });
    padded.put(param_rest, master_rest, &mut state_rest);
}

/// The update of one tensor, to be compiled for each level.
struct TensorRun<'a, K: GroupStorage, U: Update<f32, N>, const N: usize> {
    shared: Shared<'a, U, N>,
    /// Whole pairs of groups.
    pairs: Pairs<'a, K, N>,
    /// The elements behind them.
    rest: Option<Rest<'a, K, N>>,
}

/// A pair of which the first `live` elements are the tensor's.
struct Rest<'a, K: GroupStorage, const N: usize> {
    pairs: Pairs<'a, K, N>,
    live: usize,
}

/// Values of a pair between two stages: state whose roots are taken where roots are coded.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Between<const N: usize> {
    values: [[f32; PAIR]; N],
    factors: [[f32; 2]; N],
}

impl<K, U, const N: usize> CodedWork for TensorRun<'_, K, U, N>
where
    K: GroupStorage,
    U: Update<f32, N>,
{
    type Output = ();

    #[inline(always)]
    fn run<C: Codec>(self, codec: C) {
        let Self { shared, pairs, mut rest } = self;
        let (mut pairs, mut live) = (pairs, PAIR);
        // Twice through one loop, so that the code of a pair is compiled once.
        loop {
            pairs.update_all(codec, shared, live);
            match rest.take() {
                Some(rest) => (pairs, live) = (rest.pairs, rest.live),
                None => return,
            }
        }
    }
}

impl<K: GroupStorage, const N: usize> Pairs<'_, K, N> {
    /// Takes all pairs through the three stages; the first `live` elements of each count.
    #[inline(always)]
    fn update_all<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: Shared<'_, U, N>,
        live: usize,
    ) {
        let codings = codings::<U, N>();
        let count = self.param.len();
        let none = Between { values: [[0.0; PAIR]; N], factors: [[0.0; 2]; N] };
        let mut between = [none; WAITING];
        for turn in 0..count + STAGES_BEHIND {
            if turn < count {
                self.prefetch(turn);
                self.update(codec, &shared, turn, &mut between[turn % WAITING]);
            }
            if turn >= 1 && turn <= count {
                let pair = turn - 1;
                self.measure::<C, U>(codec, pair, &mut between[pair % WAITING], live);
            }
            // In this order: codes before updates take a quarter longer.
            if turn >= STAGES_BEHIND {
                let pair = turn - STAGES_BEHIND;
                let between = &between[pair % WAITING];
                for (list, coding) in codings.into_iter().enumerate() {
                    let codes = at_mut(self.codes[list], pair);
                    let (values, factors) = (&between.values[list], &between.factors[list]);
                    encode_pair(codec, coding, values, factors, shared.dither, codes);
                }
                if U::FOLLOWS {
                    self.follow(codec, &shared, pair, between);
                }
            }
        }
    }

    /// Updates the parameters of a pair and leaves its state.
    #[inline(always)]
    fn update<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: &Shared<'_, U, N>,
        pair: usize,
        between: &mut Between<N>,
    ) {
        let codings = codings::<U, N>();
        // Copies, so that no store is taken to change what is read behind it.
        let mut read = Read {
            grads: self.grad.pair(pair, shared.grad_factor),
            codes: std::array::from_fn(|list| *at(self.codes[list], pair)),
            units: std::array::from_fn(|list| at(self.units[list], pair)),
            signed: [[0.0; PAIR]; N],
        };
        let mut params = self.widen(codec, pair);
        for (list, coding) in codings.into_iter().enumerate() {
            if coding == Coding::Signed {
                codec.decode_signed(&read.codes[list], &mut read.signed[list]);
            }
        }
        // Not a loop: compilers would keep it, and everything between its turns in memory.
        read.update_block(shared, 0, &mut params, between);
        read.update_block(shared, BLOCK, &mut params, between);
        read.update_block(shared, 2 * BLOCK, &mut params, between);
        read.update_block(shared, 3 * BLOCK, &mut params, between);
        if !U::FOLLOWS {
            self.narrow(codec, pair, &params);
        }
    }

    /// Writes units of a pair and keeps its factors.
    #[inline(always)]
    fn measure<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        pair: usize,
        between: &mut Between<N>,
        live: usize,
    ) {
        let codings = codings::<U, N>();
        if live < PAIR {
            for values in &mut between.values {
                values[live..].fill(0.0);
            }
        }
        // Two lists at a time share a tree of maxima; the last may go with itself.
        let mut list = 0;
        while list < N {
            let both = [list, if list + 1 < N { list + 1 } else { list }];
            let largest = codec.largest(both.map(|list| &between.values[list]));
            let most = std::array::from_fn(|at| codings[both[at / 2]].most());
            let factors = codec.factors_of(most, largest);
            for (at, list) in both.into_iter().enumerate() {
                let units = at_mut(self.units[list], pair);
                for group in 0..2 {
                    units[group] = codings[list].unit(largest[2 * at + group]);
                    between.factors[list][group] = factors[2 * at + group];
                }
            }
            list += 2;
        }
    }

    /// Updates the parameters of a pair from its new state.
    #[inline(always)]
    fn follow<C: Codec, U: Update<f32, N>>(
        &mut self,
        codec: C,
        shared: &Shared<'_, U, N>,
        pair: usize,
        between: &Between<N>,
    ) {
        let mut params = self.widen(codec, pair);
        for (lane, param) in params.iter_mut().enumerate() {
            let state = std::array::from_fn(|list| between.values[list][lane]);
            *param = shared.update.follow(&shared.step_scalars, *param, state);
        }
        self.narrow(codec, pair, &params);
    }

    /// Values of the parameters of a pair.
    #[inline(always)]
    fn widen<C: Codec>(&self, codec: C, pair: usize) -> [f32; PAIR] {
        K::widen_pair(codec, at(self.param, pair), at(self.master, pair))
    }

    /// Writes the parameters of a pair.
    #[inline(always)]
    fn narrow<C: Codec>(&mut self, codec: C, pair: usize, values: &[f32; PAIR]) {
        let (param, master) = (at_mut(self.param, pair), at_mut(self.master, pair));
        K::narrow_pair(codec, values, param, master);
    }

    /// Asks for the lines of a pair [`AHEAD`] elements ahead.
    #[inline(always)]
    fn prefetch(&self, pair: usize) {
        let ahead = pair * PAIR + AHEAD;
        prefetch_pair(self.param.as_flattened(), ahead);
        self.grad.prefetch(ahead);
        prefetch_pair(self.master.as_flattened(), ahead);
        for codes in &self.codes {
            prefetch_pair(codes.as_flattened(), ahead);
        }
    }
}

/// Lists of a pair that an update reads, beside its parameters.
struct Read<'a, const N: usize> {
    grads: [f32; PAIR],
    codes: [[u8; PAIR]; N],
    units: [&'a [f32; 2]; N],
    /// Values in units of lists whose codes have a sign.
    signed: [[f32; PAIR]; N],
}

impl<const N: usize> Read<'_, N> {
    /// Updates a block and leaves its state. Parameters that follow their state stay.
    #[inline(always)]
    fn update_block<U: Update<f32, N>>(
        &self,
        shared: &Shared<'_, U, N>,
        first: usize,
        params: &mut [f32; PAIR],
        between: &mut Between<N>,
    ) {
        let codings = codings::<U, N>();
        // One loop for each list, each on arrays of one width.
        let mut values = block(params, first);
        let grads = block(&self.grads, first);
        let mut states = [[0.0; BLOCK]; N];
        for (list, values) in states.iter_mut().enumerate() {
            let (codes, unit) = (&self.codes[list], self.units[list][first / GROUP]);
            for (lane, value) in values.iter_mut().enumerate() {
                let at = first + lane;
                *value = match codings[list] {
                    Coding::Signed => self.signed[list][at] * unit,
                    Coding::Positive => f32::from(codes[at]) * unit,
                    Coding::Root => {
                        let root = f32::from(codes[at]) * unit;
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
        if !U::FOLLOWS {
            params[first..first + BLOCK].copy_from_slice(&values);
        }
    }
}

/// Asks for the lines of the pair that begins with an element.
#[inline(always)]
pub(super) fn prefetch_pair<T>(list: &[T], element: usize) {
    let bytes = PAIR * size_of::<T>();
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

/// Codes of a pair of groups of values, or of their roots.
#[inline(always)]
pub(super) fn encode_pair<C: Codec>(
    codec: C,
    coding: Coding,
    values: &[f32; PAIR],
    factors: &[f32; 2],
    dither: &Dither,
    codes: &mut [u8; PAIR],
) {
    match coding {
        Coding::Signed => codec.encode_signed(values, factors, codes),
        Coding::Root | Coding::Positive => {
            codec.encode_positive(values, factors, &dither.lanes, codes)
        }
    }
}

/// The elements of a block.
#[inline(always)]
fn block<T: Pod>(pair: &[T; PAIR], first: usize) -> [T; BLOCK] {
    let mut block = [T::zeroed(); BLOCK];
    block.copy_from_slice(&pair[first..first + BLOCK]);
    block
}

#[inline(always)]
fn at<T>(list: &[T], pair: usize) -> &T {
    match list.get(pair) {
        Some(pair) => pair,
        None => outside(),
    }
}

#[inline(always)]
fn at_mut<T>(list: &mut [T], pair: usize) -> &mut T {
    match list.get_mut(pair) {
        Some(pair) => pair,
        None => outside(),
    }
}
