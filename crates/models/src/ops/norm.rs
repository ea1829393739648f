//! The RMS norm.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, of_dtype, real};

/// Added to the mean square.
const EPS: f64 = 1e-6;

/// yᵢⱼ = xᵢⱼ·gainⱼ / √(meanⱼ xᵢⱼ² + 1e-6) (Zhang & Sennrich 2019, arXiv:1910.07467).
///
/// # Shapes
/// x is `[rows, width]`, the gain `[width]`; both contiguous.
pub(crate) fn rms_norm(x: &Tensor, gain: &Tensor) -> Result<Tensor> {
    x.apply_op2(gain, RmsNorm)
}

struct RmsNorm;

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = of_dtype!((s1, l1), (s2, l2); |x, gain| forward(x, gain));
        Ok((out, l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let of_x = x.apply_op3_no_bwd(gain, &grad, &OfX)?;
        let of_gain = x.apply_op2_no_bwd(&grad, &OfGain { width: gain.elem_count() })?;
        Ok((Some(of_x), Some(of_gain)))
    }
}

/// 1 / √(mean square + 1e-6) of a row.
fn inverse_rms<T: Real>(row: &[T]) -> T {
    let sum = row.iter().fold(T::zero(), |sum, &x| sum + x * x);
    let mean = sum / real(row.len() as f64);
    T::one() / (mean + real(EPS)).sqrt()
}

fn forward<T: Real>(x: &[T], gain: &[T]) -> Vec<T> {
    let mut out = vec![T::zero(); x.len()];
    let width = gain.len().max(1);
    let rows = out.par_chunks_mut(width).zip(x.par_chunks(width));
    rows.for_each(|(out, x)| {
        let inverse = inverse_rms(x);
        for (out, (&x, &gain)) in out.iter_mut().zip(x.iter().zip(gain)) {
            *out = x * inverse * gain;
        }
    });
    out
}

/// The gradient of the input.
struct OfX;

impl CustomOp3 for OfX {
    fn name(&self) -> &'static str {
        "rms-norm-of-input"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = of_dtype!((s1, l1), (s2, l2), (s3, l3); |x, gain, grad| of_x(x, gain, grad));
        Ok((out, l1.shape().clone()))
    }
}

/// With r = 1/√(mean square + ε): ∂L/∂xⱼ = r·(gⱼ·gainⱼ − xⱼ·r²·meanₖ(gₖ·gainₖ·xₖ)).
fn of_x<T: Real>(x: &[T], gain: &[T], grad: &[T]) -> Vec<T> {
    let mut out = vec![T::zero(); x.len()];
    let width = gain.len().max(1);
    let inputs = x.par_chunks(width).zip(grad.par_chunks(width));
    out.par_chunks_mut(width).zip(inputs).for_each(|(out, (x, grad))| {
        let inverse = inverse_rms(x);
        let mut dot = T::zero();
        for (out, ((&x, &gain), &grad)) in out.iter_mut().zip(x.iter().zip(gain).zip(grad)) {
            *out = grad * gain;
            dot = dot + *out * x;
        }
        let shared = dot / real(width as f64) * inverse * inverse;
        for (out, &x) in out.iter_mut().zip(x) {
            *out = inverse * (*out - x * shared);
        }
    });
    out
}

/// The gradient of the gain.
struct OfGain {
    width: usize,
}

impl CustomOp2 for OfGain {
    fn name(&self) -> &'static str {
        "rms-norm-of-gain"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = of_dtype!((s1, l1), (s2, l2); |x, grad| of_gain(x, grad, self.width));
        Ok((out, Shape::from(self.width)))
    }
}

/// ∂L/∂gainⱼ = Σᵢ gᵢⱼ·xᵢⱼ·rᵢ, rows added in order.
fn of_gain<T: Real>(x: &[T], grad: &[T], width: usize) -> Vec<T> {
    let mut out = vec![T::zero(); width];
    for (x, grad) in x.chunks(width).zip(grad.chunks(width)) {
        let inverse = inverse_rms(x);
        for (out, (&x, &grad)) in out.iter_mut().zip(x.iter().zip(grad)) {
            *out = *out + grad * x * inverse;
        }
    }
    out
}
