//! Operations of the transformer that candle composes of many passes, each with its gradient.
//!
//! Rows are worked on by rayon's threads and every row by one of them, so that no bit depends on
//! how many there are.

mod heads;
mod norm;
mod relu;
mod softmax;

use candle_core::{CpuStorage, Layout};
use num_traits::Float;

pub(crate) use heads::{Heads, apart, together};
pub(crate) use norm::rms_norm;
pub(crate) use relu::squared_relu;
pub(crate) use softmax::causal_softmax;

/// Elements of these operations: f32, and f64 for comparisons.
pub(crate) trait Real: Float + Send + Sync + 'static {}

impl Real for f32 {}
impl Real for f64 {}

/// The elements of a contiguous tensor.
fn slice<'a, T>(all: &'a [T], layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => candle_core::bail!("expected a contiguous tensor, found strides"),
    }
}

/// Runs a function of any elements on tensors of one dtype.
macro_rules! of_dtype {
    (($s1:expr, $l1:expr); $work:expr) => {
        match $s1 {
            CpuStorage::F32(a) => CpuStorage::F32($work(crate::ops::slice(a, $l1)?)),
            CpuStorage::F64(a) => CpuStorage::F64($work(crate::ops::slice(a, $l1)?)),
            _ => candle_core::bail!("expected f32 or f64 elements"),
        }
    };
    (($s1:expr, $l1:expr), ($s2:expr, $l2:expr); $work:expr) => {
        match ($s1, $s2) {
            (CpuStorage::F32(a), CpuStorage::F32(b)) => {
                CpuStorage::F32($work(crate::ops::slice(a, $l1)?, crate::ops::slice(b, $l2)?))
            }
            (CpuStorage::F64(a), CpuStorage::F64(b)) => {
                CpuStorage::F64($work(crate::ops::slice(a, $l1)?, crate::ops::slice(b, $l2)?))
            }
            _ => candle_core::bail!("expected f32 or f64 elements of one dtype"),
        }
    };
    (($s1:expr, $l1:expr), ($s2:expr, $l2:expr), ($s3:expr, $l3:expr); $work:expr) => {
        match ($s1, $s2, $s3) {
            (CpuStorage::F32(a), CpuStorage::F32(b), CpuStorage::F32(c)) => CpuStorage::F32($work(
                crate::ops::slice(a, $l1)?,
                crate::ops::slice(b, $l2)?,
                crate::ops::slice(c, $l3)?,
            )),
            (CpuStorage::F64(a), CpuStorage::F64(b), CpuStorage::F64(c)) => CpuStorage::F64($work(
                crate::ops::slice(a, $l1)?,
                crate::ops::slice(b, $l2)?,
                crate::ops::slice(c, $l3)?,
            )),
            _ => candle_core::bail!("expected f32 or f64 elements of one dtype"),
        }
    };
}

pub(crate) use of_dtype;

/// A number as an element.
fn real<T: Real>(value: f64) -> T {
    T::from(value).unwrap_or_else(T::nan)
}
