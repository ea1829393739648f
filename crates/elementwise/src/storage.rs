//! The types that tensors are kept in: those of arithmetic, f16 and bf16.

use fusestep_simd::{
    narrow_bf16, narrow_bf16_at_random, narrow_bf16_pair, narrow_bf16_pair_at_random, narrow_f16,
    widen_bf16, widen_bf16_pair, widen_f16,
};
use fusestep_tensor::DType;
use half::{bf16, f16};

use crate::{Compute, Storage};

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
