//! The types that arithmetic is done in: f32 and f64.

use fusestep_launch::Format;
use fusestep_tensor::DType;

use crate::Compute;
use crate::compute::{Converted, FormatVisitor};
use crate::format::{visit_f32, visit_f64};

impl Compute for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    #[inline(always)]
    fn round(value: f64) -> Self {
        value as f32
    }
    #[inline(always)]
    fn exact(self) -> f64 {
        self.into()
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if self > other || self.is_nan() { self } else { other }
    }
    fn visit<V: FormatVisitor<Self>>(format: Format, visitor: V) -> V::Output {
        visit_f32(format, visitor)
    }
    fn convert(format: Format, converted: Converted<'_, '_>) {
        visit_f32(format, converted);
    }
}

impl Compute for f64 {
    const DTYPE: DType = DType::F64;
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    #[inline(always)]
    fn round(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn exact(self) -> f64 {
        self
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        f64::abs(self)
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if self > other || self.is_nan() { self } else { other }
    }
    fn visit<V: FormatVisitor<Self>>(format: Format, visitor: V) -> V::Output {
        visit_f64(format, visitor)
    }
    fn convert(format: Format, converted: Converted<'_, '_>) {
        visit_f64(format, converted);
    }
}
