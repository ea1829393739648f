//! The loop of all element-wise updates.
//!
//! The plain version is `for i in 0..numel { update(i) }`. Three deviations make it faster:
//!
//! Elements go in blocks of [`LANES`], whose fixed length the compiler turns into vector
//! instructions. Each block asks for the cache lines `prefetch_bytes` ahead on all streams: 13 to
//! 15 % where tensors exceed the cache (`benches/fused_adam.rs`).
//!
//! Where whole blocks leave elements over, the last [`LANES`] are computed from a copy that was
//! taken before. They overlap the block before them with equal bits. A copy of just the elements
//! left over varies in length and costs a small tensor more than its arithmetic. That is 76 ns of
//! 608 for 64 to 512 elements (`fusestep bench` on 10,000 of them). Only a tensor shorter than a
//! block is padded with zeros.

use bytemuck::{Pod, Zeroable};
use fusestep_launch::{HostList, HostRun};
use fusestep_simd::prefetch_ahead;

use crate::across::Around;
use crate::coded::Coding;
use crate::compute::{Compute, ParamStorage, Storage};
use crate::param_storage::master;
use crate::parts::{next_part, outside, part, part_mut};
use crate::rounding::Rounding;

/// Elements of a block: one cache line of f32, two of f64.
pub const LANES: usize = 16;

const LINE_BYTES: usize = 64;

/// The update of one element, with `N` state tensors, in arithmetic of `C`.
///
/// Plain operations on `C` only: no fused multiply-add and no reassociation happens behind them, so
/// that the bits are those of `kernels/STEM.cu`.
pub trait Update<C: Compute, const N: usize>: Copy + Send + Sync {
    /// The scalars that tensors of one group share at one step.
    type StepScalars: Copy + Send + Sync;

    /// Bytes of a group's step scalars.
    const STEP_SCALAR_BYTES: usize;

    /// Codings of the state where it is kept in 8 bits; `None` if this rule's state cannot be.
    const CODINGS: Option<[Coding; N]> = None;

    /// Reads step scalars as the kernel wrote them.
    fn step_scalars(&self, bytes: &[u8]) -> Self::StepScalars;

    /// Whether [`Self::follow`] is there: the new parameter follows from the old one and the new
    /// state alone.
    const FOLLOWS: bool = false;

    /// The new parameter of an element with these values of its new state, which are roots where
    /// roots are coded; the bits are those of [`Self::element`]. Loops in stages divide in a later
    /// stage by it.
    #[inline(always)]
    fn follow(&self, _step_scalars: &Self::StepScalars, p: C, _values: [C; N]) -> C {
        p
    }

    /// The new parameter and state of an element with gradient `g`.
    fn element(&self, step_scalars: &Self::StepScalars, p: C, g: C, state: [C; N]) -> (C, [C; N]);
}

/// Runs an update over all tensors of a call, for parameters kept as `K`, state as `S`, and
/// rounding as `R`: [`crate::run_format`] once the compiler knows the format. At the portable level
/// only lists of values are updated here.
pub(crate) fn run_stored<C, K, S, R, U, const N: usize>(update: &U, run: HostRun<'_, '_>)
where
    C: Compute,
    K: ParamStorage<C>,
    S: Storage<C>,
    R: Rounding,
    U: Update<C, N>,
{
    let call = run.call;
    let mut lists = run.lists.iter_mut();
    let param = HostList::take_mut::<K::Param>(&mut lists);
    let mut around = Around::<C, K, K::Param>::of(call, lists.next(), run.across);
    let mut state: [&mut [S]; N] = std::array::from_fn(|_| HostList::take_mut(&mut lists));
    let mut none = Vec::new();
    let master = master::<K::Master>(&mut lists, param.len(), &mut none);
    // The whole loop is compiled for the level, so that a small tensor costs no dispatch.
    call.level.run_compiled(
        const { K::IS_VALUE && S::IS_VALUE },
        #[inline(always)]
        || {
            // Local copies: a value that may lie anywhere may overlap a block, which then stays in
            // memory.
            let update = *update;
            let grad_factor = C::round(call.grad_factor);
            let Around { most, ahead_bytes, .. } = around;
            for span in run.spans {
                let bytes = call.step_scalars_of(span.group, U::STEP_SCALAR_BYTES + R::KEY_BYTES);
                let step_scalars = update.step_scalars(bytes);
                let (mut first, chunk) = (0, span);
                while first < chunk.numel {
                    let span = chunk.part(first, most);
                    let begin = first;
                    first += span.numel;
                    let elements = span.start..span.start + span.numel;
                    let param = part_mut(param, &elements);
                    let master = part_mut(master, &elements);
                    let mut lists = state.iter_mut();
                    let mut state: [&mut [S]; N] =
                        std::array::from_fn(|_| next_part(&mut lists, &elements));
                    let grad = around.before(elements, param, master);
                    let mut lists = state.iter_mut();
                    let mut tensor = Tensor::<C, K, S, R, N> {
                        param: &mut *param,
                        master: &mut *master,
                        grad,
                        state: std::array::from_fn(|_| next_part(&mut lists, &(0..span.numel))),
                        grad_factor,
                        rounding: R::of(&bytes[U::STEP_SCALAR_BYTES..], &span),
                        ahead_bytes,
                    };
                    tensor.update(update, step_scalars);
                    if !around.is_alone {
                        let state = state.each_ref().map(|list| &**list);
                        around.after(begin, chunk.numel, span.start, param, master, &state);
                    }
                }
            }
        },
    );
}

/// The lists of one tensor, all of one numel.
pub(crate) struct Tensor<'a, C: Compute, K: ParamStorage<C>, S, R, const N: usize> {
    pub(crate) param: &'a mut [K::Param],
    pub(crate) master: &'a mut [K::Master],
    pub(crate) grad: &'a [K::Param],
    pub(crate) state: [&'a mut [S]; N],
    pub(crate) grad_factor: C,
    pub(crate) rounding: R,
    /// Distance in bytes from a block to the cache lines that are asked for.
    pub(crate) ahead_bytes: usize,
}

/// New values of consecutive elements.
pub(crate) struct Block<P, B, S, const N: usize> {
    param: [P; LANES],
    master: [B; LANES],
    state: [[S; LANES]; N],
}

impl<P: Pod, B: Pod, S: Pod, const N: usize> Block<P, B, S, N> {
    #[inline(always)]
    fn zeroed() -> Self {
        Self {
            param: [P::zeroed(); LANES],
            master: [B::zeroed(); LANES],
            state: [[S::zeroed(); LANES]; N],
        }
    }

    /// Takes all elements, fewer than [`LANES`].
    ///
    /// Compiled once for all rules and levels, like all that few tensors need.
    #[inline(never)]
    fn take_all(
        &mut self,
        grads: &mut [P; LANES],
        param: &[P],
        grad: &[P],
        master: &[B],
        state: &[&[S]; N],
    ) {
        let numel = param.len();
        grads[..numel].copy_from_slice(grad);
        self.param[..numel].copy_from_slice(param);
        self.master[..numel].copy_from_slice(master);
        for (values, list) in self.state.iter_mut().zip(state) {
            values[..numel].copy_from_slice(list);
        }
    }

    #[inline(never)]
    fn put_all(&self, param: &mut [P], master: &mut [B], state: [&mut [S]; N]) {
        let numel = param.len();
        param.copy_from_slice(&self.param[..numel]);
        master.copy_from_slice(&self.master[..numel]);
        for (list, values) in state.into_iter().zip(&self.state) {
            list.copy_from_slice(&values[..numel]);
        }
    }
}

impl<C, K, S, R, const N: usize> Tensor<'_, C, K, S, R, N>
where
    C: Compute,
    K: ParamStorage<C>,
    S: Storage<C>,
    R: Rounding,
{
    #[inline(always)]
    pub(crate) fn update<U: Update<C, N>>(&mut self, update: U, step_scalars: U::StepScalars) {
        let numel = self.param.len();
        let whole = numel / LANES * LANES;
        let mut block = Block::zeroed();
        let mut grad = [K::Param::zeroed(); LANES];
        if numel < LANES {
            let state = self.state.each_ref().map(|list| &**list);
            block.take_all(&mut grad, self.param, self.grad, self.master, &state);
        } else if whole < numel {
            // In place: a block that is returned is read whole just after it was written in parts.
            block.param = last(self.param);
            block.master = last(self.master);
            for list in 0..N {
                block.state[list] = last(self.state[list]);
            }
            grad = last(self.grad);
        }
        // Twice through one loop, so that the code of a block is compiled once.
        let mut rest = (whole < numel).then_some((&mut block, &mut grad));
        let mut lists = self.state.iter_mut();
        let mut tensor = Tensor::<C, K, S, R, N> {
            param: part_mut(self.param, &(0..whole)),
            master: part_mut(self.master, &(0..whole)),
            grad: part(self.grad, &(0..whole)),
            state: std::array::from_fn(|_| next_part(&mut lists, &(0..whole))),
            ..*self
        };
        loop {
            tensor.update_blocks(update, step_scalars);
            let Some((block, grad)) = rest.take() else {
                break;
            };
            let mut lists = block.state.iter_mut();
            tensor = Tensor {
                param: &mut block.param,
                master: &mut block.master,
                grad,
                state: std::array::from_fn(|_| match lists.next() {
                    Some(list) => &mut list[..],
                    None => &mut [],
                }),
                rounding: self.rounding.at(numel.saturating_sub(LANES)),
                ..*self
            };
        }
        if numel < LANES {
            let state = self.state.each_mut().map(|list| &mut **list);
            block.put_all(self.param, self.master, state);
        } else if whole < numel {
            put_last(self.param, &block.param);
            put_last(self.master, &block.master);
            for list in 0..N {
                put_last(self.state[list], &block.state[list]);
            }
        }
    }

    /// Updates whole blocks.
    #[inline(always)]
    fn update_blocks<U: Update<C, N>>(&mut self, update: U, step_scalars: U::StepScalars) {
        let mut first = 0;
        if Self::PAIRED {
            // A factor of 1 changes no bit, and arithmetic is what these formats wait for: 3 to 5 %
            // of Adam.
            first = if self.grad_factor == C::ONE {
                self.update_all_pairs::<U, false>(update, step_scalars)
            } else {
                self.update_all_pairs::<U, true>(update, step_scalars)
            };
        }
        while first + LANES <= self.param.len() {
            self.prefetch(first);
            let block = self.block(update, step_scalars, first);
            self.store(&block, first);
            first += LANES;
        }
    }

    /// The new values of [`LANES`] elements from `first` on.
    #[inline(always)]
    pub(crate) fn block<U: Update<C, N>>(
        &self,
        update: U,
        step_scalars: U::StepScalars,
        first: usize,
    ) -> Block<K::Param, K::Master, S, N> {
        let mut param = load(self.param, first);
        let mut master = load(self.master, first);
        let grad = load(self.grad, first);
        let mut state: [[S; LANES]; N] = std::array::from_fn(|list| load(self.state[list], first));
        // One loop for each list and one for the update, each on arrays of one width: loops over a
        // mixture of 16 and 32 bits become vectors of half the width at best.
        let (mut values, mut grads) = ([C::ZERO; LANES], [C::ZERO; LANES]);
        let mut states = [[C::ZERO; LANES]; N];
        for lane in 0..LANES {
            values[lane] = K::widen(param[lane], master[lane]);
        }
        for lane in 0..LANES {
            grads[lane] = grad[lane].widen() * self.grad_factor;
        }
        for list in 0..N {
            for lane in 0..LANES {
                states[list][lane] = state[list][lane].widen();
            }
        }
        for lane in 0..LANES {
            let old: [C; N] = std::array::from_fn(|list| states[list][lane]);
            let new;
            (values[lane], new) = update.element(&step_scalars, values[lane], grads[lane], old);
            for list in 0..N {
                states[list][lane] = new[list];
            }
        }
        let rounding = self.rounding.at(first);
        // The state first: it is there while the parameter still waits for a division.
        for list in 0..N {
            for lane in 0..LANES {
                state[list][lane] = if R::AT_RANDOM {
                    S::narrow_at_random(states[list][lane], rounding.random_bits(lane, list + 1))
                } else {
                    S::narrow(states[list][lane])
                };
            }
        }
        for lane in 0..LANES {
            (param[lane], master[lane]) = if R::AT_RANDOM {
                K::narrow_at_random(values[lane], rounding.random_bits(lane, 0))
            } else {
                K::narrow(values[lane])
            };
        }
        Block { param, master, state }
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, block: &Block<K::Param, K::Master, S, N>, first: usize) {
        let elements = first..first + LANES;
        part_mut(self.param, &elements).copy_from_slice(&block.param);
        part_mut(self.master, &elements).copy_from_slice(&block.master);
        for (list, values) in self.state.iter_mut().zip(&block.state) {
            part_mut(list, &elements).copy_from_slice(values);
        }
    }

    /// Asks for the lines of the block `ahead_bytes` ahead; beyond the tensor's end lies the next
    /// tensor of the arena.
    #[inline(always)]
    pub(crate) fn prefetch(&self, first: usize) {
        prefetch_block(self.param, first, self.ahead_bytes);
        prefetch_block(self.master, first, self.ahead_bytes);
        prefetch_block(self.grad, first, self.ahead_bytes);
        for list in &self.state {
            prefetch_block(list, first, self.ahead_bytes);
        }
    }
}

#[inline(always)]
fn prefetch_block<T>(list: &[T], first: usize, ahead_bytes: usize) {
    let mut line = 0;
    while line * LINE_BYTES < LANES * size_of::<T>() {
        // Not reached for elements without bytes, which divide by 0.
        let ahead = first + (ahead_bytes + line * LINE_BYTES) / size_of::<T>();
        prefetch_ahead(list, ahead);
        line += 1;
    }
}

/// The last block of a list.
#[inline(always)]
fn last<T: Pod>(list: &[T]) -> [T; LANES] {
    match list.last_chunk() {
        Some(block) => *block,
        None => outside(),
    }
}

/// Puts a block back where [`last`] has it from.
#[inline(always)]
fn put_last<T: Pod>(list: &mut [T], block: &[T; LANES]) {
    match list.last_chunk_mut() {
        Some(own) => *own = *block,
        None => outside(),
    }
}

/// The block from element `first` on.
#[inline(always)]
fn load<T: Pod>(list: &[T], first: usize) -> [T; LANES] {
    let mut block = [T::zeroed(); LANES];
    block.copy_from_slice(part(list, &(first..first + LANES)));
    block
}
