//! Gradients of one micro-step, added to those before.

use bytemuck::Pod;
use fusestep_simd::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::DType;

/// What becomes of a gradient that is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Absorb {
    /// It is the window's first.
    pub(crate) first: bool,
    /// What it is multiplied with.
    pub(crate) weight: Option<f64>,
    /// It is the window's last, and the sum is divided by this; `None` if others follow.
    pub(crate) last: Option<Divisor>,
}

/// What a window's sum is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Divisor(pub(crate) f64);

/// Adds `grad` to what `bucket` has, or to the f32 sums of 16-bit gradients, which are rounded into `bucket` at the end.
///
/// `grad` is `None` for a tensor without a gradient in this micro-step.
pub(crate) fn absorb(
    dtype: DType,
    bucket: &mut [u8],
    sums: Option<&mut [f32]>,
    grad: Option<&[u8]>,
    how: Absorb,
) {
    match (dtype, sums) {
        (DType::F16 | DType::BF16, Some(sums)) => {
            if let Some(grad) = grad {
                add_widened(dtype, sums, grad, how);
            }
            if let Some(divisor) = how.last {
                round(dtype, sums, bucket, divisor);
            }
        }
        (DType::F32, _) => {
            let (weight, divisor) = (how.weight.map(|w| w as f32), how.last.map(|d| d.0 as f32));
            floats(bucket, grad, how.first, weight, divisor, 1.0f32);
        }
        (DType::F64, _) => floats(
            bucket,
            grad,
            how.first,
            how.weight,
            how.last.map(|d| d.0),
            1.0f64,
        ),
        _ => {
            if let Some(grad) = grad {
                bucket.copy_from_slice(grad);
            }
        }
    }
}

fn floats<T>(
    bucket: &mut [u8],
    grad: Option<&[u8]>,
    first: bool,
    weight: Option<T>,
    divisor: Option<T>,
    one: T,
) where
    T: Pod
        + PartialEq
        + std::ops::Add<Output = T>
        + std::ops::Mul<Output = T>
        + std::ops::Div<Output = T>,
{
    let width = size_of::<T>();
    if let Some(grad) = grad {
        match (first, weight) {
            (true, None) => bucket.copy_from_slice(grad),
            _ => {
                let sums: &mut [T] = bytemuck::cast_slice_mut(bucket);
                for (sum, grad) in sums.iter_mut().zip(grad.chunks_exact(width)) {
                    let grad: T = bytemuck::pod_read_unaligned(grad);
                    let grad = weight.map_or(grad, |weight| grad * weight);
                    *sum = if first { grad } else { *sum + grad };
                }
            }
        }
    }
    if let Some(divisor) = divisor.filter(|divisor| *divisor != one) {
        let sums: &mut [T] = bytemuck::cast_slice_mut(bucket);
        for sum in sums {
            *sum = *sum / divisor;
        }
    }
}

fn add_widened(dtype: DType, sums: &mut [f32], grad: &[u8], how: Absorb) {
    let weight = how.weight.map(|weight| weight as f32);
    for (sum, grad) in sums.iter_mut().zip(grad.chunks_exact(2)) {
        let bits = u16::from_le_bytes([grad[0], grad[1]]);
        let grad = match dtype {
            DType::F16 => widen_f16(bits),
            _ => widen_bf16(bits),
        };
        let grad = weight.map_or(grad, |weight| grad * weight);
        *sum = if how.first { grad } else { *sum + grad };
    }
}

fn round(dtype: DType, sums: &[f32], bucket: &mut [u8], divisor: Divisor) {
    let divisor = divisor.0 as f32;
    for (sum, out) in sums.iter().zip(bucket.chunks_exact_mut(2)) {
        let mean = sum / divisor;
        let bits = match dtype {
            DType::F16 => narrow_f16(mean),
            _ => narrow_bf16(mean),
        };
        out.copy_from_slice(&bits.to_le_bytes());
    }
}
