//! Gradient accumulation: gradients of one micro-step are added to the sums.

use std::ops::{Add, Div, Mul};

use bytemuck::Pod;
use fusestep_launch::Accumulation;
use fusestep_simd::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::DType;

/// Way in which a given gradient is added to the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Absorb {
    /// Whether the gradient is the first since the last update.
    pub(crate) first: bool,
    /// Factor that the gradient is multiplied with.
    pub(crate) weight: Option<f64>,
    /// Divisor of the sum, if the gradient is the last before the next update.
    pub(crate) last: Option<Divisor>,
}

impl Absorb {
    /// Work on a device: a gradient that is there is added, and the divisor follows behind the
    /// last.
    pub(crate) fn on_device<E>(
        self,
        addend: Addend,
        mut run: impl FnMut(Accumulation) -> Result<(), E>,
    ) -> Result<(), E> {
        let weight = self.weight.unwrap_or(1.0);
        if addend == Addend::Given {
            run(if self.first {
                Accumulation::First { weight }
            } else {
                Accumulation::Add { weight }
            })?;
        }
        match self.last {
            Some(Divisor(divisor)) => run(Accumulation::Mean { divisor }),
            None => Ok(()),
        }
    }
}

/// Gradient at its place on a device, to be added to the sums: given, or none in this micro-step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addend {
    Given,
    Missing,
}

/// The number that the sum over micro-steps is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Divisor(pub(crate) f64);

/// Adds `grad` to `sums`, or writes it there if it is the first, and puts what the sums come to
/// into `out` if it is the last. Sums of 16-bit gradients are f32, others of the gradients' own
/// type; without `sums` they are formed in `out` itself.
///
/// `grad` is `None` for a tensor without a gradient in this micro-step.
pub(crate) fn absorb(
    dtype: DType,
    out: &mut [u8],
    sums: Option<&mut [u8]>,
    grad: Option<&[u8]>,
    how: Absorb,
) {
    match (dtype, sums) {
        (DType::F16 | DType::BF16, Some(sums)) => {
            let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
            if let Some(grad) = grad {
                add_widened(dtype, sums, grad, how);
            }
            if let Some(divisor) = how.last {
                round(dtype, sums, out, divisor);
            }
        }
        (DType::F32, sums) => absorb_as(out, sums, grad, how, |value| value as f32),
        (DType::F64, sums) => absorb_as(out, sums, grad, how, |value| value),
        _ => {
            if let Some(grad) = grad {
                out.copy_from_slice(grad);
            }
        }
    }
}

/// Gradients of `T`, whose sums are of the same type; `cast` rounds weight and divisor to it.
fn absorb_as<T>(
    out: &mut [u8],
    sums: Option<&mut [u8]>,
    grad: Option<&[u8]>,
    how: Absorb,
    cast: fn(f64) -> T,
) where
    T: Pod + PartialEq + Add<Output = T> + Mul<Output = T> + Div<Output = T>,
{
    let weight = how.weight.map(cast);
    match sums {
        Some(sums) => {
            add(sums, grad, how.first, weight);
            if how.last.is_some() {
                out.copy_from_slice(sums);
            }
        }
        None => add(out, grad, how.first, weight),
    }
    let divisor = how.last.map(|last| cast(last.0));
    if let Some(divisor) = divisor.filter(|divisor| *divisor != cast(1.0)) {
        for sum in bytemuck::cast_slice_mut::<u8, T>(out) {
            *sum = *sum / divisor;
        }
    }
}

/// `sums ← sums + grad · weight`, or `grad · weight` if it is the first.
fn add<T>(sums: &mut [u8], grad: Option<&[u8]>, first: bool, weight: Option<T>)
where
    T: Pod + Add<Output = T> + Mul<Output = T>,
{
    let Some(grad) = grad else {
        return;
    };
    if first && weight.is_none() {
        return sums.copy_from_slice(grad);
    }
    let sums: &mut [T] = bytemuck::cast_slice_mut(sums);
    for (sum, grad) in sums.iter_mut().zip(grad.chunks_exact(size_of::<T>())) {
        let grad: T = bytemuck::pod_read_unaligned(grad);
        let grad = weight.map_or(grad, |weight| grad * weight);
        *sum = if first { grad } else { *sum + grad };
    }
}

fn add_widened(dtype: DType, sums: &mut [f32], grad: &[u8], how: Absorb) {
    let weight = how.weight.map(|weight| weight as f32);
    for (sum, grad) in sums.iter_mut().zip(grad.chunks_exact(2)) {
        let grad = widened(dtype, u16::from_le_bytes([grad[0], grad[1]]));
        let grad = weight.map_or(grad, |weight| grad * weight);
        *sum = if how.first { grad } else { *sum + grad };
    }
}

fn round(dtype: DType, sums: &[f32], out: &mut [u8], divisor: Divisor) {
    let divisor = divisor.0 as f32;
    for (sum, out) in sums.iter().zip(out.chunks_exact_mut(2)) {
        out.copy_from_slice(&narrowed(dtype, sum / divisor).to_le_bytes());
    }
}

/// The value of an f16, or else of a bf16.
pub(crate) fn widened(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::F16 => widen_f16(bits),
        _ => widen_bf16(bits),
    }
}

/// The f16, or else the bf16, that is nearest.
pub(crate) fn narrowed(dtype: DType, value: f32) -> u16 {
    match dtype {
        DType::F16 => narrow_f16(value),
        _ => narrow_bf16(value),
    }
}
