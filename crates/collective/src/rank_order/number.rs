//! The element types as numbers.

use fusestep_simd::{narrow_bf16, widen_bf16};
use fusestep_tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements that are in registers at a time, from the first rank's to the result.
pub(super) const LANES: usize = 32;

/// Arithmetic in the type that reductions are done in.
pub(super) trait Arithmetic: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// Whether `self` is strictly greater; false with NaN on either side.
    fn wins_over(self, other: Self) -> bool;
    fn is_nan(self) -> bool;
    fn divided(self, divisor: f64) -> Self;
    /// The greater of two; `self` of equals, NaN if there is one.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if other.wins_over(self) | other.is_nan() { other } else { self }
    }
    /// The lesser of two; `self` of equals, NaN if there is one.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        if self.wins_over(other) | other.is_nan() { other } else { self }
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
            fn divided(self, divisor: f64) -> Self {
                self / divisor as $float
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
            fn divided(self, _: f64) -> Self {
                panic!("an average of integers is refused before any data is read")
            }
        }
    )*};
}

floats!(f32, f64);
integers!(i32, i64, u8, u16);

/// A storage type and the type it is reduced in.
pub(super) trait Number: Element {
    type Wide: Arithmetic + bytemuck::Pod;
    /// The values, unchanged.
    fn widen(line: &[Self; LANES]) -> [Self::Wide; LANES];
    /// The nearest values, ties to even.
    fn narrow(line: &[Self::Wide; LANES]) -> [Self; LANES];
}

macro_rules! reduced_as_stored {
    ($($number:ty),*) => {$(
        impl Number for $number {
            type Wide = Self;
            #[inline(always)]
            fn widen(line: &[Self; LANES]) -> [Self; LANES] {
                *line
            }
            #[inline(always)]
            fn narrow(line: &[Self; LANES]) -> [Self; LANES] {
                *line
            }
        }
    )*};
}

reduced_as_stored!(f32, f64, i32, i64, u8, u16);

impl Number for bf16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(line: &[Self; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        for lane in 0..LANES {
            wide[lane] = widen_bf16(line[lane].to_bits());
        }
        wide
    }
    #[inline(always)]
    fn narrow(line: &[f32; LANES]) -> [Self; LANES] {
        let mut narrow = [Self::ZERO; LANES];
        for lane in 0..LANES {
            narrow[lane] = Self::from_bits(narrow_bf16(line[lane]));
        }
        narrow
    }
}

/// Conversions by the processor's own instructions, which `half` finds at run time. Our conversions
/// take longer than all else that is done with a line.
impl Number for f16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(line: &[Self; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        line.convert_to_f32_slice(&mut wide);
        wide
    }
    #[inline(always)]
    fn narrow(line: &[f32; LANES]) -> [Self; LANES] {
        let mut narrow = [Self::ZERO; LANES];
        narrow.convert_from_f32_slice(line);
        narrow
    }
}
