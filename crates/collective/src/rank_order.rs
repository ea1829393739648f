//! Reduction of every element in rank order.

use std::ops::Range;

use fusestep_simd::{Level, prefetch_ahead};
use fusestep_tensor::{DType, Element};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::ReduceOp;

/// Elements reduced at a time. Loads and stores of larger blocks come in turns, and memory has nothing to do while results go from the
/// first-level cache to the second; of smaller ones each costs more than its arithmetic.
const BLOCK: usize = 128;

/// How far ahead of a block inputs from memory are asked for.
const AHEAD_BYTES: usize = 2048;

/// Inputs of fewer bytes in all may be in a core's cache, where asking for them takes time and saves none.
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
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.inputs.len()
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

fn reduce<T: Number>(level: Level, op: ReduceOp, len_bytes: usize, ranks: &mut impl Ranks) {
    let in_all = len_bytes.saturating_mul(ranks.world_size());
    // The whole loop is compiled for the level: a block is done in the time that calls for its parts would take.
    level.run(
        #[inline(always)]
        || {
            let ahead_bytes = (in_all > CACHED_BYTES).then_some(AHEAD_BYTES);
            reduce_blocks::<T>(op, ahead_bytes, len_bytes, ranks);
        },
    );
}

/// Asks for what all ranks have of these bytes.
#[inline(always)]
fn ask_for(ranks: &impl Ranks, bytes: Range<usize>) {
    for rank in 0..ranks.world_size() {
        let input = ranks.input(rank, bytes.clone());
        for line in (0..input.len()).step_by(LINE_BYTES) {
            prefetch_ahead(input, line);
        }
    }
}

/// What a block is worked on in.
struct Scratch<T: Number> {
    result: [T::Wide; BLOCK],
    wide: [T::Wide; BLOCK],
    narrow: [T; BLOCK],
}

#[inline(always)]
fn reduce_blocks<T: Number>(
    op: ReduceOp,
    ahead_bytes: Option<usize>,
    len_bytes: usize,
    ranks: &mut impl Ranks,
) {
    let mut scratch = Scratch::<T> {
        result: [T::Wide::default(); BLOCK],
        wide: [T::Wide::default(); BLOCK],
        narrow: [T::default(); BLOCK],
    };
    let step_bytes = BLOCK * size_of::<T>();
    let mut start = 0;
    while start + step_bytes <= len_bytes {
        if let Some(ahead) = ahead_bytes {
            let from = start + ahead;
            ask_for(ranks, len_bytes.min(from)..len_bytes.min(from + step_bytes));
        }
        // Of a length that the compiler knows.
        reduce_block(op, &mut scratch, start, BLOCK, ranks);
        start += step_bytes;
    }
    if start < len_bytes {
        let numel = (len_bytes - start) / size_of::<T>();
        reduce_block(op, &mut scratch, start, numel, ranks);
    }
}

#[inline(always)]
fn reduce_block<T: Number>(
    op: ReduceOp,
    scratch: &mut Scratch<T>,
    start: usize,
    numel: usize,
    ranks: &mut impl Ranks,
) {
    let bytes = start..start + numel * size_of::<T>();
    let world_size = ranks.world_size();
    let result = &mut scratch.result[..numel];
    let wide = &mut scratch.wide[..numel];
    let narrow = &mut scratch.narrow[..numel];
    let first = ranks.input(0, bytes.clone());
    let second = (world_size > 1).then(|| ranks.input(1, bytes.clone()));
    let begun = match (T::as_wide(first), second.and_then(T::as_wide)) {
        (Some(x), Some(y)) => {
            combine(op, result, x, y);
            2
        }
        _ => {
            T::widen(elements(first, narrow), result);
            1
        }
    };
    for rank in begun..world_size {
        let input = elements(ranks.input(rank, bytes.clone()), narrow);
        fold(op, result, T::widened(input, wide));
    }
    if op == ReduceOp::Average {
        result.iter_mut().for_each(
            #[inline(always)]
            |x| *x = x.divided(world_size),
        );
    }
    let result = T::narrowed(result, narrow);
    ranks.store(bytes, bytemuck::cast_slice(result));
}

/// Bytes as elements; if they are not aligned, a copy in `scratch`.
#[inline(always)]
fn elements<'a, T: Element>(bytes: &'a [u8], scratch: &'a mut [T]) -> &'a [T] {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => elements,
        Err(_) => {
            bytemuck::cast_slice_mut::<T, u8>(scratch).copy_from_slice(bytes);
            scratch
        }
    }
}

/// A loop for each operation, with the operation as `$combine`: chosen once, outside of the loop.
macro_rules! by_operation {
    ($op:expr, $combine:ident, $loop:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Average => {
                let $combine = W::plus;
                $loop
            }
            ReduceOp::Prod => {
                let $combine = W::times;
                $loop
            }
            ReduceOp::Max => {
                let $combine = W::max;
                $loop
            }
            ReduceOp::Min => {
                let $combine = W::min;
                $loop
            }
        }
    };
}

/// The first two ranks.
#[inline(always)]
fn combine<W: Arithmetic>(op: ReduceOp, result: &mut [W], x: &[W], y: &[W]) {
    by_operation!(op, combine, {
        for ((to, &x), &y) in result.iter_mut().zip(x).zip(y) {
            *to = combine(x, y);
        }
    });
}

/// One more rank.
#[inline(always)]
fn fold<W: Arithmetic>(op: ReduceOp, result: &mut [W], input: &[W]) {
    by_operation!(op, combine, {
        for (x, &y) in result.iter_mut().zip(input) {
            *x = combine(*x, y);
        }
    });
}

/// Arithmetic in the type that reductions are done in.
trait Arithmetic: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// Strictly greater; false with NaN on either side.
    fn wins_over(self, other: Self) -> bool;
    fn is_nan(self) -> bool;
    fn divided(self, world_size: usize) -> Self;
    /// The greater; `self` of equals, NaN if there is one.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if other.wins_over(self) | other.is_nan() {
            other
        } else {
            self
        }
    }
    /// The lesser; `self` of equals, NaN if there is one.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        if self.wins_over(other) | other.is_nan() {
            other
        } else {
            self
        }
    }
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
    /// The elements where they lie, if they are aligned and need no widening.
    fn as_wide(bytes: &[u8]) -> Option<&[Self::Wide]>;
    /// Writes the widened elements.
    fn widen(from: &[Self], to: &mut [Self::Wide]);
    /// The widened elements, in `scratch` if they are not so already.
    fn widened<'a>(from: &'a [Self], scratch: &'a mut [Self::Wide]) -> &'a [Self::Wide];
    /// The elements rounded to nearest even, in `scratch` if they are not stored so already.
    fn narrowed<'a>(from: &'a [Self::Wide], scratch: &'a mut [Self]) -> &'a [Self];
}

macro_rules! reduced_as_stored {
    ($($number:ty),*) => {$(
        impl Number for $number {
            type Wide = Self;
            #[inline(always)]
            fn as_wide(bytes: &[u8]) -> Option<&[Self]> {
                bytemuck::try_cast_slice(bytes).ok()
            }
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn widened<'a>(from: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                from
            }
            #[inline(always)]
            fn narrowed<'a>(from: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
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
            #[inline(always)]
            fn as_wide(_: &[u8]) -> Option<&[f32]> {
                None
            }
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            #[inline(always)]
            fn widened<'a>(from: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
                Self::widen(from, scratch);
                scratch
            }
            #[inline(always)]
            fn narrowed<'a>(from: &'a [f32], scratch: &'a mut [Self]) -> &'a [Self] {
                scratch.convert_from_f32_slice(from);
                scratch
            }
        }
    )*};
}

reduced_in_f32!(f16, bf16);
