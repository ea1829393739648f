//! The type that tensors are kept in.

use bytemuck::Pod;
use fusestep_simd::{
    narrow_bf16, narrow_bf16_at_random, narrow_bf16_pair, narrow_bf16_pair_at_random, narrow_f16,
    widen_bf16, widen_bf16_pair, widen_f16,
};
use fusestep_tensor::DType;
use half::{bf16, f16};

use crate::Compute;

/// A type that tensors are kept in and that arithmetic in `C` reads exactly and writes with one
/// rounding.
pub trait Storage<C: Compute>: Pod + Send + Sync {
    /// The element type.
    const DTYPE: DType;
    /// Whether it is `C` itself.
    const IS_VALUE: bool = false;
    /// The value, unchanged.
    fn widen(self) -> C;
    /// The nearest value, ties to even.
    fn narrow(value: C) -> Self;
    /// Whether two neighbours are read and written as one word of 32 bits.
    const PAIRED: bool = false;
    /// The values of the lower and of the upper half; only where [`Self::PAIRED`].
    #[inline(always)]
    fn widen_pair(_word: u32) -> [C; 2] {
        [C::ZERO; 2]
    }
    /// The word of two values, each as by [`Self::narrow`]; only where [`Self::PAIRED`]. Neither is
    /// NaN if they are `NUMBERS`.
    #[inline(always)]
    fn narrow_pair<const NUMBERS: bool>(_values: [C; 2]) -> u32 {
        0
    }
    /// The word of two values, each as by [`Self::narrow_at_random`]; only where [`Self::PAIRED`].
    #[inline(always)]
    fn narrow_pair_at_random(_values: [C; 2], _random_bits: [u32; 2]) -> u32 {
        0
    }
    /// A neighbouring value, chosen by the lower 16 bits of `random_bits`; the nearest one for a
    /// type that is not rounded at random.
    #[inline(always)]
    fn narrow_at_random(value: C, _random_bits: u32) -> Self {
        Self::narrow(value)
    }
}

impl<C: Compute> Storage<C> for C {
    const DTYPE: DType = C::DTYPE;
    const IS_VALUE: bool = true;
    #[inline(always)]
    fn widen(self) -> C {
        self
    }
    #[inline(always)]
    fn narrow(value: C) -> Self {
        value
    }
}

impl Storage<f32> for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_f16(self.to_bits())
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        f16::from_bits(narrow_f16(value))
    }
}

impl Storage<f32> for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_bf16(self.to_bits())
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        bf16::from_bits(narrow_bf16(value))
    }
    #[inline(always)]
    fn narrow_at_random(value: f32, random_bits: u32) -> Self {
        bf16::from_bits(narrow_bf16_at_random(value, random_bits))
    }
    const PAIRED: bool = true;
    #[inline(always)]
    fn widen_pair(word: u32) -> [f32; 2] {
        widen_bf16_pair(word)
    }
    #[inline(always)]
    fn narrow_pair<const NUMBERS: bool>(values: [f32; 2]) -> u32 {
        narrow_bf16_pair::<NUMBERS>(values)
    }
    #[inline(always)]
    fn narrow_pair_at_random(values: [f32; 2], random_bits: [u32; 2]) -> u32 {
        narrow_bf16_pair_at_random(values, random_bits)
    }
}
