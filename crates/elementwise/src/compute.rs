//! The type that arithmetic is done in.

use std::ops::{Add, Div, Mul, Neg, Sub};

use bytemuck::Pod;
use fusestep_launch::Format;
use fusestep_tensor::DType;

use crate::converted::Converted;
use crate::format::{FormatVisitor, visit_f32, visit_f64};

/// A type that arithmetic is done in; every operation is correctly rounded.
pub trait Compute:
    Pod
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The storage type that holds it exactly.
    const DTYPE: DType;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Rounds once, to nearest even.
    fn round(value: f64) -> Self;
    /// This value in f64.
    fn exact(self) -> f64;
    /// The correctly rounded square root.
    fn sqrt(self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// Runs the code that is compiled for `format`; see [`crate::run_format`].
    fn visit<V: FormatVisitor<Self>>(format: Format, visitor: V) -> V::Output;
    /// Runs an update of values over lists of `format`: not generic, so that it is compiled once
    /// for all rules.
    #[doc(hidden)]
    fn convert(format: Format, converted: Converted<'_, '_>);
}

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
    fn visit<V: FormatVisitor<Self>>(format: Format, visitor: V) -> V::Output {
        visit_f64(format, visitor)
    }
    fn convert(format: Format, converted: Converted<'_, '_>) {
        visit_f64(format, converted);
    }
}
