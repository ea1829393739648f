//! The kernel on the host.
//!
//! The plain version is `for i in 0..numel { update(i) }`. Two deviations, both for memory speed: elements go in blocks of
//! [`LANES`], whose fixed length the compiler turns into vector instructions, and each block asks for the cache lines
//! [`PREFETCH_BYTES`] ahead on all four streams, worth 13 to 15 % where tensors exceed the cache (`benches/fused_adam.rs`).
//! What is left over after whole blocks is computed as one more block that ends with the tensor and overlaps the one before; only
//! a tensor shorter than a block is computed in a copy padded with zeros. Copies of varying length cost a small tensor more than
//! its arithmetic: 76 ns of 608 for 64 to 512 elements (`fusestep bench` on 10,000 of them).

use std::marker::PhantomData;

use fusestep_launch::{
    Access, ArgumentLayout, HostCall, HostList, HostSpans, MAX_LISTS, MultiTensorKernel, SetValues,
    TensorList,
};
use fusestep_simd::prefetch_ahead;

use crate::device::{
    Compute, FLAG_AMSGRAD, FLAG_MAXIMIZE, Scalars, Set, lists, padded_bytes, read_values,
    write_padded,
};
use crate::{Adam, Objective, SecondMoment};

/// Elements of a block: one cache line of f32, two of f64.
const LANES: usize = 16;

/// How far ahead of the block cache lines are asked for.
const PREFETCH_BYTES: usize = 512;

const LINE_BYTES: usize = 64;

/// Adam for parameters and gradients of `T`, with all arithmetic in `T`.
///
/// # Cost
/// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v), 36 with AMSGrad; twice that for f64.
#[derive(Debug, Clone)]
pub struct AdamKernel<T> {
    config: Adam,
    lists: [TensorList; 5],
    compute: PhantomData<T>,
}

impl<T: Compute> AdamKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Adam) -> Self {
        Self {
            config,
            lists: lists(T::DTYPE),
            compute: PhantomData,
        }
    }
}

impl<T: Compute> MultiTensorKernel for AdamKernel<T> {
    fn stem(&self) -> &'static str {
        "fused_adam"
    }

    fn entry(&self) -> &'static str {
        T::ENTRY
    }

    fn lists(&self) -> &[TensorList] {
        debug_assert_eq!(self.lists[1].access, Access::Read);
        match self.config.second_moment {
            SecondMoment::Running => &self.lists[..4],
            SecondMoment::Largest => &self.lists,
        }
    }

    fn argument_layout(&self) -> ArgumentLayout {
        ArgumentLayout {
            lists: self.lists().len(),
            scalar_bytes: padded_bytes::<T>(5),
            set_bytes: padded_bytes::<T>(4),
        }
    }

    fn flags(&self) -> u32 {
        let amsgrad = match self.config.second_moment {
            SecondMoment::Running => 0,
            SecondMoment::Largest => FLAG_AMSGRAD,
        };
        let maximize = match self.config.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        amsgrad | maximize
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let Adam {
            beta1, beta2, eps, ..
        } = self.config;
        let scalars = [beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps];
        write_padded(&scalars.map(T::round), out);
    }

    fn write_set(&self, values: SetValues, out: &mut [u8]) {
        let set = self.config.set(values);
        let values = [set.step_size, set.bias2_sqrt, set.decay, set.l2];
        write_padded(&values.map(T::round), out);
    }

    fn run_host(&self, call: HostCall<'_>, lists: [HostList<'_>; MAX_LISTS], spans: HostSpans<'_>) {
        let run = match (self.config.second_moment, self.config.objective) {
            (SecondMoment::Running, Objective::Minimize) => run::<T, false, false>,
            (SecondMoment::Running, Objective::Maximize) => run::<T, false, true>,
            (SecondMoment::Largest, Objective::Minimize) => run::<T, true, false>,
            (SecondMoment::Largest, Objective::Maximize) => run::<T, true, true>,
        };
        run(call, lists, spans);
    }
}

/// Updates all tensors; the whole loop is compiled for the level, so that a small tensor costs no dispatch.
fn run<T: Compute, const AMSGRAD: bool, const MAXIMIZE: bool>(
    call: HostCall<'_>,
    lists: [HostList<'_>; MAX_LISTS],
    spans: HostSpans<'_>,
) {
    let [beta1, one_minus_beta1, beta2, one_minus_beta2, eps] = read_values::<T, 5>(call.scalars);
    let scalars = Scalars {
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
    };
    let set_bytes = padded_bytes::<T>(4);
    let [p, g, m, v, w, ..] = lists;
    let (p, g, m, v) = (
        p.elements_mut(),
        g.elements(),
        m.elements_mut(),
        v.elements_mut(),
    );
    let w = if AMSGRAD { w.elements_mut() } else { &mut [] };
    call.level.run(
        #[inline(always)]
        || {
            for span in spans {
                let start = span.class as usize * set_bytes;
                let [step_size, bias2_sqrt, decay, l2] = read_values::<T, 4>(&call.sets[start..]);
                let set = Set {
                    step_size,
                    bias2_sqrt,
                    decay,
                    l2,
                };
                let elements = span.start..span.start + span.numel;
                let mut tensor = Tensor {
                    p: &mut p[elements.clone()],
                    g: &g[elements.clone()],
                    m: &mut m[elements.clone()],
                    v: &mut v[elements.clone()],
                    w: if AMSGRAD { &mut w[elements] } else { &mut [] },
                };
                if set.l2 == T::zeroed() {
                    tensor.update::<AMSGRAD, MAXIMIZE, false>(&scalars, &set);
                } else {
                    tensor.update::<AMSGRAD, MAXIMIZE, true>(&scalars, &set);
                }
            }
        },
    );
}

/// The lists of one tensor, all of one numel; `w` (the largest v) is empty without AMSGrad.
struct Tensor<'a, T> {
    p: &'a mut [T],
    g: &'a [T],
    m: &'a mut [T],
    v: &'a mut [T],
    w: &'a mut [T],
}

impl<T: Compute> Tensor<'_, T> {
    #[inline(always)]
    fn update<const AMSGRAD: bool, const MAXIMIZE: bool, const L2: bool>(
        &mut self,
        scalars: &Scalars<T>,
        set: &Set<T>,
    ) {
        let numel = self.p.len();
        if numel < LANES {
            let block = self.block::<AMSGRAD, MAXIMIZE, L2>(scalars, set, 0, numel);
            return self.store::<AMSGRAD>(&block, 0, numel);
        }
        let mut first = 0;
        while first + 2 * LANES <= numel {
            self.prefetch::<AMSGRAD>(first);
            let block = self.block::<AMSGRAD, MAXIMIZE, L2>(scalars, set, first, LANES);
            self.store::<AMSGRAD>(&block, first, LANES);
            first += LANES;
        }
        // The last whole block and the last LANES elements overlap unless numel is a multiple of LANES; both are computed from
        // the old values before either is stored, so the overlap is written twice with the same bits.
        self.prefetch::<AMSGRAD>(first);
        let block = self.block::<AMSGRAD, MAXIMIZE, L2>(scalars, set, first, LANES);
        if first + LANES < numel {
            let last = numel - LANES;
            let overlapping = self.block::<AMSGRAD, MAXIMIZE, L2>(scalars, set, last, LANES);
            self.store::<AMSGRAD>(&overlapping, last, LANES);
        }
        self.store::<AMSGRAD>(&block, first, LANES);
    }

    /// The new values of `count` elements from `first` on.
    #[inline(always)]
    fn block<const AMSGRAD: bool, const MAXIMIZE: bool, const L2: bool>(
        &self,
        scalars: &Scalars<T>,
        set: &Set<T>,
        first: usize,
        count: usize,
    ) -> Block<T> {
        let mut block = Block {
            p: load(self.p, first, count),
            m: load(self.m, first, count),
            v: load(self.v, first, count),
            w: if AMSGRAD {
                load(self.w, first, count)
            } else {
                [T::zeroed(); LANES]
            },
        };
        block.update::<AMSGRAD, MAXIMIZE, L2>(scalars, set, &load(self.g, first, count));
        block
    }

    #[inline(always)]
    fn store<const AMSGRAD: bool>(&mut self, block: &Block<T>, first: usize, count: usize) {
        let range = first..first + count;
        self.p[range.clone()].copy_from_slice(&block.p[..count]);
        self.m[range.clone()].copy_from_slice(&block.m[..count]);
        self.v[range.clone()].copy_from_slice(&block.v[..count]);
        if AMSGRAD {
            self.w[range].copy_from_slice(&block.w[..count]);
        }
    }

    /// Asks for the lines of the block [`PREFETCH_BYTES`] ahead; beyond the tensor's end lies the next tensor of the arena.
    #[inline(always)]
    fn prefetch<const AMSGRAD: bool>(&self, first: usize) {
        let mut line = 0;
        while line * LINE_BYTES < LANES * size_of::<T>() {
            let ahead = first + (PREFETCH_BYTES + line * LINE_BYTES) / size_of::<T>();
            prefetch_ahead(self.p, ahead);
            prefetch_ahead(self.g, ahead);
            prefetch_ahead(self.m, ahead);
            prefetch_ahead(self.v, ahead);
            if AMSGRAD {
                prefetch_ahead(self.w, ahead);
            }
            line += 1;
        }
    }
}

/// `count` elements from `first` on, followed by zeros.
#[inline(always)]
fn load<T: Compute>(from: &[T], first: usize, count: usize) -> [T; LANES] {
    let mut block = [T::zeroed(); LANES];
    block[..count].copy_from_slice(&from[first..first + count]);
    block
}

struct Block<T> {
    p: [T; LANES],
    m: [T; LANES],
    v: [T; LANES],
    w: [T; LANES],
}

impl<T: Compute> Block<T> {
    /// The update of `kernels/fused_adam.cu`, operation for operation: no fused multiply-add, no reassociation.
    #[inline(always)]
    fn update<const AMSGRAD: bool, const MAXIMIZE: bool, const L2: bool>(
        &mut self,
        k: &Scalars<T>,
        set: &Set<T>,
        grad: &[T; LANES],
    ) {
        for (i, &g) in grad.iter().enumerate() {
            let (p, mut g) = (self.p[i], g);
            if MAXIMIZE {
                g = -g;
            }
            if L2 {
                g = g + set.l2 * p;
            }
            let m = k.beta1 * self.m[i] + k.one_minus_beta1 * g;
            let v = k.beta2 * self.v[i] + k.one_minus_beta2 * (g * g);
            let mut w = v;
            if AMSGRAD {
                w = if self.w[i] > v { self.w[i] } else { v };
                self.w[i] = w;
            }
            let d = w.sqrt() / set.bias2_sqrt + k.eps;
            self.p[i] = p * set.decay - set.step_size * (m / d);
            self.m[i] = m;
            self.v[i] = v;
        }
    }
}
