//! Softmax of attention scores, of which later positions are left out.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, of_dtype, real};

/// pᵢⱼ = exp(scale·(sᵢⱼ − mᵢ)) / Σ over j ≤ i, 0 for j > i; mᵢ is the largest score of the row.
///
/// # Shapes
/// `[…, T, T]`, contiguous.
pub(crate) fn causal_softmax(scores: &Tensor, scale: f64) -> Result<Tensor> {
    scores.apply_op1(CausalSoftmax { scale })
}

#[derive(Clone, Copy)]
struct CausalSoftmax {
    scale: f64,
}

/// How many columns a row has, which is how many rows a matrix has.
fn length(layout: &Layout) -> Result<usize> {
    match layout.dims() {
        [.., rows, columns] if rows == columns => Ok(*columns),
        found => candle_core::bail!("expected square matrices of scores, found {found:?}"),
    }
}

impl CustomOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        "causal-softmax"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let length = length(l)?;
        let out = of_dtype!((s, l); |scores| forward(scores, length, self.scale));
        Ok((out, l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, probabilities: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let backward = CausalSoftmaxBackward { scale: self.scale };
        probabilities.apply_op2_no_bwd(&grad, &backward).map(Some)
    }
}

fn forward<T: Real>(scores: &[T], length: usize, scale: f64) -> Vec<T> {
    let mut out = vec![T::zero(); scores.len()];
    let scale = real::<T>(scale);
    let rows = out.par_chunks_mut(length).zip(scores.par_chunks(length));
    rows.enumerate().for_each(|(index, (out, scores))| {
        let seen = index % length + 1;
        let (out, scores) = (&mut out[..seen], &scores[..seen]);
        let most = scores.iter().copied().fold(T::neg_infinity(), T::max);
        let mut sum = T::zero();
        for (out, &score) in out.iter_mut().zip(scores) {
            *out = (scale * (score - most)).exp();
            sum = sum + *out;
        }
        let inverse = T::one() / sum;
        out.iter_mut().for_each(|out| *out = *out * inverse);
    });
    out
}

struct CausalSoftmaxBackward {
    scale: f64,
}

impl CustomOp2 for CausalSoftmaxBackward {
    fn name(&self) -> &'static str {
        "causal-softmax-backward"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let length = length(l1)?;
        let out = of_dtype!((s1, l1), (s2, l2); |probabilities, grad| {
            backward(probabilities, grad, length, self.scale)
        });
        Ok((out, l1.shape().clone()))
    }
}

/// ∂L/∂sᵢⱼ = scale·pᵢⱼ·(gᵢⱼ − Σₖ pᵢₖ·gᵢₖ).
fn backward<T: Real>(probabilities: &[T], grad: &[T], length: usize, scale: f64) -> Vec<T> {
    let mut out = vec![T::zero(); grad.len()];
    let scale = real::<T>(scale);
    let inputs = probabilities.par_chunks(length).zip(grad.par_chunks(length));
    let rows = out.par_chunks_mut(length).zip(inputs);
    rows.enumerate().for_each(|(index, (out, (p, g)))| {
        let seen = index % length + 1;
        let (out, p, g) = (&mut out[..seen], &p[..seen], &g[..seen]);
        let dot = p.iter().zip(g).fold(T::zero(), |sum, (&p, &g)| sum + p * g);
        for (out, (&p, &g)) in out.iter_mut().zip(p.iter().zip(g)) {
            *out = scale * p * (g - dot);
        }
    });
    out
}
