//! The element types as numbers.

use fusestep_simd::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::Element;
use half::{bf16, f16};

/// Arithmetic in the type that reductions are done in.
pub(super) trait Arithmetic: Copy + Default {
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
pub(super) trait Number: Element {
    type Wide: Arithmetic;
    /// The same value.
    fn wide(self) -> Self::Wide;
    /// The nearest value, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! reduced_as_stored {
    ($($number:ty),*) => {$(
        impl Number for $number {
            type Wide = Self;
            #[inline(always)]
            fn wide(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(wide: Self) -> Self {
                wide
            }
        }
    )*};
}

reduced_as_stored!(f32, f64, i32, i64, u8, u16);

macro_rules! reduced_in_f32 {
    ($($number:ty, $widen:ident, $narrow:ident);*) => {$(
        impl Number for $number {
            type Wide = f32;
            #[inline(always)]
            fn wide(self) -> f32 {
                $widen(self.to_bits())
            }
            #[inline(always)]
            fn narrow(wide: f32) -> Self {
                Self::from_bits($narrow(wide))
            }
        }
    )*};
}

reduced_in_f32!(f16, widen_f16, narrow_f16; bf16, widen_bf16, narrow_bf16);
