//! Reduction of every element in rank order.

mod number;
pub(crate) mod tree;

use std::ops::Range;

use fusestep_simd::{Level, fetches_by_itself, prefetch_ahead};
use fusestep_tensor::DType;
use half::{bf16, f16};
use smallvec::SmallVec;

use self::number::{Arithmetic, LANES, Number};
use crate::{Divisor, ReduceOp};

/// Bytes of a rank that are asked for at a time. Memory gives consecutive lines of one rank faster
/// than lines of several ranks in turns. Longer bursts keep each other waiting.
const BURST_BYTES: usize = 512;

/// Least number of ranks whose tree is added burst by burst. Of three the tree is their order, and
/// of four it is added in registers.
pub const FIRST_TREE: usize = 5;

/// Distance ahead of their use at which lines of inputs are asked for, on processors that want it.
const AHEAD_BYTES: usize = 1024;

/// Inputs of fewer bytes in all may be in a core's cache. Asking for their lines takes time and
/// saves none.
const CACHED_BYTES: usize = 2 << 20;

const LINE_BYTES: usize = 64;

/// Inputs of all ranks to a reduction, and the place of its result.
pub trait Ranks {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;
    /// Bytes of each rank that one core reduces one after the other, with these among them. Of many
    /// bytes, few are in the core's cache.
    fn share_bytes(&self) -> usize;
    /// A range of bytes of what `rank` contributes.
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8];
    /// Takes the result of a range of bytes; their inputs are not asked for again.
    fn store(&mut self, bytes: Range<usize>, result: &[u8]);
    /// A range of both ranks at once, and the ranks that get the result, if there are two ranks and
    /// results go where inputs lie. Loops that look slices up for every line keep memory waiting.
    fn pair(&mut self, _bytes: Range<usize>) -> Option<([&mut [u8]; 2], Range<usize>)> {
        None
    }
}

/// Reduces `len_bytes` bytes of every rank, element by element, in rank order.
///
/// ```text
/// sum      ((x₀ + x₁) + x₂) + …            prod     ((x₀ · x₁) · x₂) · …
/// average  sum / n                         max, min NaN if any is NaN; of equals the lowest rank's
/// tree     ((x₀ + x₁) + (x₂ + x₃)) + …, divided once: [`ReduceOp::Tree`]
/// ```
///
/// Elements are reduced in their own type; f16 and bf16 are widened to f32, reduced there and
/// rounded once at the end, to nearest even. Integers wrap around: an overflow is the same on all
/// ranks and levels, and raises no error. The bits depend on neither the level nor how a buffer is
/// cut.
///
/// # Shapes
/// `len_bytes` is a multiple of the element's length. Inputs need no alignment.
/// # Panics
/// If `op` is [`ReduceOp::Average`] or [`ReduceOp::Tree`] and `dtype` an integer;
/// [`Call::blocks`](crate::Call::blocks) refuses that.
/// # Cost
/// Each input is read once and the result handed over once; nothing is allocated.
// Never inlined, so that other crates share what this crate has compiled for the same ranks.
#[inline(never)]
pub fn reduce_in_rank_order(
    level: Level,
    dtype: DType,
    op: ReduceOp,
    len_bytes: usize,
    ranks: &mut impl Ranks,
) {
    match dtype {
        DType::F32 => reduce::<f32>(level, op, len_bytes, ranks),
        DType::F64 => reduce::<f64>(level, op, len_bytes, ranks),
        DType::F16 => reduce::<f16>(level, op, len_bytes, ranks),
        DType::BF16 => reduce::<bf16>(level, op, len_bytes, ranks),
        DType::I32 => reduce::<i32>(level, op, len_bytes, ranks),
        DType::I64 => reduce::<i64>(level, op, len_bytes, ranks),
        DType::U8 => reduce::<u8>(level, op, len_bytes, ranks),
        DType::U16 => reduce::<u16>(level, op, len_bytes, ranks),
    }
}

/// The merges of [`TreeOrder`] for one sum of each rank, which has as many leaves on all.
///
/// # Panics
/// If there is no rank.
pub fn merges_of_ranks(world_size: usize) -> SmallVec<[usize; 16]> {
    tree::merges(world_size)
}

/// The order in which sums of parts of a tree are added.
#[derive(Clone, Copy, Debug)]
pub struct TreeOrder<'a> {
    /// The number that the sum of all is divided by.
    pub divisor: Divisor,
    /// Left neighbours that are added to each sum before the next one comes, the nearest first.
    pub merges: &'a [usize],
}

/// Adds sums that ranks bring along one binary tree, some ranks more than one, and divides once.
///
/// ```text
/// T(a, b) = T(a, m) + T(m, b)
/// ```
/// The sums come in the order of the tree's leaves, each as what one rank of `sums` contributes.
/// The bits are those of [`ReduceOp::Tree`] where each rank brings one sum of as many leaves.
///
/// # Shapes
/// As many sums as [`TreeOrder::merges`], which leave one sum at the end.
/// # Panics
/// If `dtype` is an integer, or a neighbour is added that is not there.
/// # Cost
/// As [`reduce_in_rank_order`].
#[inline(never)]
pub fn reduce_along_tree(
    level: Level,
    dtype: DType,
    order: TreeOrder<'_>,
    waiting: &mut tree::WaitingSums,
    len_bytes: usize,
    sums: &mut dyn Ranks,
) {
    assert_eq!(order.merges.len(), sums.world_size(), "an entry for each sum");
    let TreeOrder { divisor, merges } = order;
    match dtype {
        DType::F32 => tree::reduce::<f32>(level, divisor, merges, waiting, len_bytes, sums),
        DType::F64 => tree::reduce::<f64>(level, divisor, merges, waiting, len_bytes, sums),
        DType::F16 => tree::reduce::<f16>(level, divisor, merges, waiting, len_bytes, sums),
        DType::BF16 => tree::reduce::<bf16>(level, divisor, merges, waiting, len_bytes, sums),
        other => panic!("expected floating-point sums, found {other}"),
    }
}

/// [`reduce_in_rank_order`] of slices: `out ← reduce(inputs[0], inputs[1], …)`.
///
/// # Panics
/// If `inputs` is empty or the lengths differ.
pub fn reduce_slices(level: Level, dtype: DType, op: ReduceOp, inputs: &[&[u8]], out: &mut [u8]) {
    assert!(
        !inputs.is_empty() && inputs.iter().all(|input| input.len() == out.len()),
        "the result has the length of every input, of which there is at least one"
    );
    let len_bytes = out.len();
    let mut slices = Slices { inputs, share_bytes: len_bytes, out };
    reduce_in_rank_order(level, dtype, op, len_bytes, &mut slices);
}

/// Slices of all ranks, and the place of the result.
pub(crate) struct Slices<'a> {
    pub(crate) inputs: &'a [&'a [u8]],
    pub(crate) out: &'a mut [u8],
    /// [`Ranks::share_bytes`].
    pub(crate) share_bytes: usize,
}

impl Ranks for Slices<'_> {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.inputs.len()
    }
    #[inline(always)]
    fn share_bytes(&self) -> usize {
        self.share_bytes
    }
    #[inline(always)]
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        &self.inputs[rank][bytes]
    }
    #[inline(always)]
    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        self.out[bytes].copy_from_slice(result);
    }
}

/// Distance in bytes at which inputs are asked for; 0 asks for none.
fn ahead_of<T: Number>(ranks: &dyn Ranks) -> usize {
    let in_all = ranks.share_bytes().saturating_mul(ranks.world_size());
    let asks = in_all > CACHED_BYTES && !fetches_by_itself(size_of::<T>());
    if asks { AHEAD_BYTES } else { 0 }
}

fn reduce<T: Number>(level: Level, op: ReduceOp, len_bytes: usize, ranks: &mut impl Ranks) {
    if let (ReduceOp::Tree(divisor), FIRST_TREE..) = (op, ranks.world_size()) {
        let (merges, mut waiting) =
            (tree::merges(ranks.world_size()), tree::WaitingSums::default());
        return tree::reduce::<T>(level, divisor, &merges, &mut waiting, len_bytes, ranks);
    }
    let ahead = ahead_of::<T>(ranks);
    // The whole loop is compiled for the level: calls for parts of a line would take as long as the
    // whole line.
    level.run(
        #[inline(always)]
        || reduce_bursts::<T>(op, len_bytes, ranks, ahead),
    );
}

/// Reduces all whole bursts, then the rest. Lines that lie `ahead` bytes behind a burst are asked
/// for first; 0 asks for none.
///
/// One loop serves both cases, and the rest is reduced apart. This code is compiled for eight
/// types, five operations, three levels and all kinds of ranks.
#[inline(always)]
fn reduce_bursts<T: Number>(op: ReduceOp, len_bytes: usize, ranks: &mut impl Ranks, ahead: usize) {
    let line_bytes = LANES * size_of::<T>();
    let mut start = 0;
    while start + BURST_BYTES <= len_bytes {
        let burst = start..start + BURST_BYTES;
        if ahead > 0 {
            ask_ahead(ranks, burst.clone(), ahead);
        }
        match ranks.pair(burst.clone()) {
            Some((pair, into)) => reduce_pair::<T>(op, pair, into),
            None => {
                for line in burst.step_by(line_bytes) {
                    reduce_line::<T>(op, line..line + line_bytes, ranks);
                }
            }
        }
        start += BURST_BYTES;
    }
    if start < len_bytes {
        reduce_rest::<T>(op, start..len_bytes, ranks);
    }
}

/// Reduces a rest shorter than a burst; compiled once for all levels and ranks.
#[inline(never)]
fn reduce_rest<T: Number>(op: ReduceOp, bytes: Range<usize>, ranks: &mut dyn Ranks) {
    let line_bytes = LANES * size_of::<T>();
    for line in bytes.clone().step_by(line_bytes) {
        reduce_line::<T>(op, line..bytes.end.min(line + line_bytes), ranks);
    }
}

/// Asks for the lines of all ranks that lie `ahead` bytes behind `bytes`. They may lie beyond the
/// bytes that are reduced here.
#[inline(always)]
fn ask_ahead(ranks: &impl Ranks, bytes: Range<usize>, ahead: usize) {
    for rank in 0..ranks.world_size() {
        let input = ranks.input(rank, bytes.clone());
        for line in (0..BURST_BYTES).step_by(LINE_BYTES) {
            prefetch_ahead(input, ahead + line);
        }
    }
}

/// Reduces a burst of two ranks.
#[inline(always)]
fn reduce_pair<T: Number>(op: ReduceOp, [x, y]: [&mut [u8]; 2], into: Range<usize>) {
    // Slices of a length that the compiler knows.
    let (x, y) = (&mut x[..BURST_BYTES], &mut y[..BURST_BYTES]);
    let line_bytes = LANES * size_of::<T>();
    for line in (0..BURST_BYTES).step_by(line_bytes) {
        let (x, y) = (&mut x[line..line + line_bytes], &mut y[line..line + line_bytes]);
        let mut result = wide::<T>(x);
        combine(op, &mut result, wide::<T>(y));
        let result = narrow::<T>(op, 2, result);
        let result = bytemuck::bytes_of(&result);
        if into.contains(&0) {
            x.copy_from_slice(result);
        }
        if into.contains(&1) {
            y.copy_from_slice(result);
        }
    }
}

/// Reduces [`LANES`] elements, or the last ones if they are fewer.
#[inline(always)]
fn reduce_line<T: Number>(op: ReduceOp, bytes: Range<usize>, ranks: &mut (impl Ranks + ?Sized)) {
    let (world_size, len) = (ranks.world_size(), bytes.len());
    let mut result = wide::<T>(ranks.input(0, bytes.clone()));
    let in_order = if matches!(op, ReduceOp::Tree(_)) && world_size == 4 { 2 } else { world_size };
    for rank in 1..in_order {
        combine(op, &mut result, wide::<T>(ranks.input(rank, bytes.clone())));
    }
    if in_order < world_size {
        let mut right = wide::<T>(ranks.input(2, bytes.clone()));
        combine(op, &mut right, wide::<T>(ranks.input(3, bytes.clone())));
        combine(op, &mut result, right);
    }
    let result = narrow::<T>(op, world_size, result);
    let result = bytemuck::bytes_of(&result);
    if len == result.len() {
        ranks.store(bytes, result)
    } else {
        ranks.store(bytes, &result[..len])
    }
}

/// The result as it is stored.
#[inline(always)]
fn narrow<T: Number>(op: ReduceOp, world_size: usize, mut result: [T::Wide; LANES]) -> [T; LANES] {
    let divisor = match op {
        ReduceOp::Average => world_size as f64,
        ReduceOp::Tree(divisor) => divisor.value(),
        _ => return T::narrow(&result),
    };
    for x in &mut result {
        *x = x.divided(divisor);
    }
    T::narrow(&result)
}

/// The elements of a line, which need no alignment; missing elements are zero.
#[inline(always)]
fn wide<T: Number>(bytes: &[u8]) -> [T::Wide; LANES] {
    let mut line = [T::default(); LANES];
    let into = bytemuck::bytes_of_mut(&mut line);
    if bytes.len() == into.len() {
        into.copy_from_slice(bytes)
    } else {
        into[..bytes.len()].copy_from_slice(bytes)
    }
    T::widen(&line)
}

/// Reduces the elements of one more rank into the result.
#[inline(always)]
fn combine<W: Arithmetic>(op: ReduceOp, result: &mut [W; LANES], input: [W; LANES]) {
    macro_rules! lanes {
        ($combine:ident) => {
            for lane in 0..LANES {
                result[lane] = result[lane].$combine(input[lane]);
            }
        };
    }
    match op {
        ReduceOp::Sum | ReduceOp::Average | ReduceOp::Tree(_) => lanes!(plus),
        ReduceOp::Prod => lanes!(times),
        ReduceOp::Max => lanes!(max),
        ReduceOp::Min => lanes!(min),
    }
}
