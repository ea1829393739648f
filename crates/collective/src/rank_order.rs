//! Reduction of every element in rank order.

use std::ops::Range;

use fusestep_simd::{Level, prefetch_ahead};
use fusestep_tensor::{DType, Element};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::ReduceOp;

/// Elements reduced at a time: the running result and what is added to it stay in the first-level cache.
const BLOCK: usize = 2048;

/// The same for short reductions, where clearing the larger blocks would be a good part of the work.
const SHORT_BLOCK: usize = 512;

/// Bytes reduced at a time where inputs come from memory. Loads and stores of larger blocks come in turns, and memory has nothing to
/// do while results go from the first-level cache to the second: two ranks took 4.1 ms for 25 MiB, and take 2.8.
const STREAM_BYTES: usize = 512;

/// How far ahead of a block inputs from memory are asked for.
const AHEAD_BYTES: usize = 1024;

/// Inputs of fewer bytes in all may be in a core's cache, where asking for them takes more time than it saves: half again for 1 MiB.
const CACHED_BYTES: usize = 2 << 20;

const LINE_BYTES: usize = 64;

/// Where a reduction finds the ranks' elements and puts the result.
pub trait Ranks {
    /// The number of ranks, at least 1.
    fn world_size(&self) -> usize;
    /// A range of bytes of what `rank` contributes.
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8];
    /// Takes the result of a range of bytes; their inputs are not asked for again.
    fn store(&mut self, bytes: Range<usize>, result: &[u8]);
}

/// Reduces `len_bytes` bytes of every rank, element by element, in rank order.
///
/// ```text
/// sum      ((x₀ + x₁) + x₂) + …            prod     ((x₀ · x₁) · x₂) · …
/// average  sum / n                         max, min NaN if any is NaN; of equals the lowest rank's
/// ```
///
/// In the element's own type; f16 and bf16 are widened to f32, reduced there and rounded once at the end, to nearest even.
/// Integers wrap around: an overflow is the same on all ranks and levels, and raises no error.
/// The bits depend on neither the level nor how a buffer is cut.
///
/// # Shapes
/// `len_bytes` is a multiple of the element's length. Inputs need no alignment.
/// # Panics
/// If `op` is [`ReduceOp::Average`] and `dtype` an integer; [`Call::blocks`](crate::Call::blocks) refuses that.
/// # Cost
/// Each input is read once and the result handed over once; nothing is allocated.
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
    reduce_in_rank_order(level, dtype, op, len_bytes, &mut Slices { inputs, out });
}

struct Slices<'a> {
    inputs: &'a [&'a [u8]],
    out: &'a mut [u8],
}

impl Ranks for Slices<'_> {
    fn world_size(&self) -> usize {
        self.inputs.len()
    }
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        &self.inputs[rank][bytes]
    }
    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        self.out[bytes].copy_from_slice(result);
    }
}

fn reduce<T: Number>(level: Level, op: ReduceOp, len_bytes: usize, ranks: &mut impl Ranks) {
    let element_bytes = size_of::<T>();
    if len_bytes.saturating_mul(ranks.world_size()) > CACHED_BYTES {
        let walk = Walk {
            step: STREAM_BYTES / element_bytes,
            ahead_bytes: Some(AHEAD_BYTES),
        };
        return reduce_blocks::<T, SHORT_BLOCK>((level, op), walk, len_bytes, ranks);
    }
    let walk = |step| Walk {
        step,
        ahead_bytes: None,
    };
    match len_bytes <= SHORT_BLOCK * element_bytes {
        true => {
            reduce_blocks::<T, SHORT_BLOCK>((level, op), walk(SHORT_BLOCK), len_bytes, ranks);
        }
        false => reduce_blocks::<T, BLOCK>((level, op), walk(BLOCK), len_bytes, ranks),
    }
}

/// How blocks follow each other.
#[derive(Clone, Copy)]
struct Walk {
    /// Elements of a block.
    step: usize,
    ahead_bytes: Option<usize>,
}

/// Asks for what all ranks have of these bytes.
fn ask_for(ranks: &impl Ranks, bytes: Range<usize>) {
    for rank in 0..ranks.world_size() {
        let input = ranks.input(rank, bytes.clone());
        for line in (0..input.len()).step_by(LINE_BYTES) {
            prefetch_ahead(input, line);
        }
    }
}

fn reduce_blocks<T: Number, const BLOCK: usize>(
    (level, op): (Level, ReduceOp),
    walk: Walk,
    len_bytes: usize,
    ranks: &mut impl Ranks,
) {
    let element_bytes = size_of::<T>();
    let mut result = [T::Wide::default(); BLOCK];
    let mut wide = [T::Wide::default(); BLOCK];
    let mut narrow = [T::default(); BLOCK];
    let step_bytes = walk.step * element_bytes;
    for start in (0..len_bytes).step_by(step_bytes) {
        let bytes = start..len_bytes.min(start + step_bytes);
        if let Some(ahead) = walk.ahead_bytes {
            ask_for(
                ranks,
                len_bytes.min(start + ahead)..len_bytes.min(bytes.end + ahead),
            );
        }
        let numel = bytes.len() / element_bytes;
        let (result, wide, narrow) = (
            &mut result[..numel],
            &mut wide[..numel],
            &mut narrow[..numel],
        );
        T::widen(
            level,
            elements(ranks.input(0, bytes.clone()), narrow),
            result,
        );
        for rank in 1..ranks.world_size() {
            let input = elements(ranks.input(rank, bytes.clone()), narrow);
            fold(level, op, result, T::widened(level, input, wide));
        }
        if op == ReduceOp::Average {
            let world_size = ranks.world_size();
            level.run(
                #[inline(always)]
                || result.iter_mut().for_each(|x| *x = x.divided(world_size)),
            );
        }
        let result = T::narrowed(level, result, narrow);
        ranks.store(bytes, bytemuck::cast_slice(result));
    }
}

/// Bytes as elements; if they are not aligned, a copy in `scratch`.
fn elements<'a, T: Element>(bytes: &'a [u8], scratch: &'a mut [T]) -> &'a [T] {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => elements,
        Err(_) => {
            bytemuck::cast_slice_mut::<T, u8>(scratch).copy_from_slice(bytes);
            scratch
        }
    }
}

/// One more rank.
fn fold<W: Arithmetic>(level: Level, op: ReduceOp, result: &mut [W], input: &[W]) {
    #[inline(always)]
    fn each<W: Copy>(level: Level, result: &mut [W], input: &[W], combine: impl Fn(W, W) -> W) {
        level.run(
            #[inline(always)]
            || {
                for (x, &y) in result.iter_mut().zip(input) {
                    *x = combine(*x, y);
                }
            },
        );
    }
    match op {
        ReduceOp::Sum | ReduceOp::Average => each(
            level,
            result,
            input,
            #[inline(always)]
            |x, y| x.plus(y),
        ),
        ReduceOp::Prod => each(
            level,
            result,
            input,
            #[inline(always)]
            |x, y| x.times(y),
        ),
        ReduceOp::Max => each(
            level,
            result,
            input,
            #[inline(always)]
            |x, y| if y.wins_over(x) | y.is_nan() { y } else { x },
        ),
        ReduceOp::Min => each(
            level,
            result,
            input,
            #[inline(always)]
            |x, y| if x.wins_over(y) | y.is_nan() { y } else { x },
        ),
    }
}

/// Arithmetic in the type that reductions are done in.
trait Arithmetic: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// Strictly greater; false with NaN on either side.
    fn wins_over(self, other: Self) -> bool;
    fn is_nan(self) -> bool;
    fn divided(self, world_size: usize) -> Self;
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Arithmetic for $float {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn wins_over(self, other: Self) -> bool {
                self > other
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                self != self
            }
            #[inline(always)]
            fn divided(self, world_size: usize) -> Self {
                self / world_size as $float
            }
        }
    )*};
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Arithmetic for $integer {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn wins_over(self, other: Self) -> bool {
                self > other
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }
            fn divided(self, _: usize) -> Self {
                panic!("an average of integers is refused before any data is read")
            }
        }
    )*};
}

floats!(f32, f64);
integers!(i32, i64, u8, u16);

/// A storage type and the type it is reduced in.
trait Number: Element {
    type Wide: Arithmetic;
    /// Writes the widened elements.
    fn widen(level: Level, from: &[Self], to: &mut [Self::Wide]);
    /// The widened elements, in `scratch` if they are not so already.
    fn widened<'a>(
        level: Level,
        from: &'a [Self],
        scratch: &'a mut [Self::Wide],
    ) -> &'a [Self::Wide];
    /// The elements rounded to nearest even, in `scratch` if they are not stored so already.
    fn narrowed<'a>(level: Level, from: &'a [Self::Wide], scratch: &'a mut [Self]) -> &'a [Self];
}

macro_rules! reduced_as_stored {
    ($($number:ty),*) => {$(
        impl Number for $number {
            type Wide = Self;
            fn widen(_: Level, from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            fn widened<'a>(_: Level, from: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                from
            }
            fn narrowed<'a>(_: Level, from: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                from
            }
        }
    )*};
}

reduced_as_stored!(f32, f64, i32, i64, u8, u16);

macro_rules! reduced_in_f32 {
    ($($number:ty),*) => {$(
        impl Number for $number {
            type Wide = f32;
            fn widen(level: Level, from: &[Self], to: &mut [f32]) {
                level.run(#[inline(always)] || from.convert_to_f32_slice(to));
            }
            fn widened<'a>(level: Level, from: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
                Self::widen(level, from, scratch);
                scratch
            }
            fn narrowed<'a>(level: Level, from: &'a [f32], scratch: &'a mut [Self]) -> &'a [Self] {
                level.run(#[inline(always)] || scratch.convert_from_f32_slice(from));
                scratch
            }
        }
    )*};
}

reduced_in_f32!(f16, bf16);
