//! The squared ReLU.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, of_dtype};

/// Elements that one thread takes at a time.
const SHARE: usize = 16_384;

/// max(x, 0)² (So et al. 2021, arXiv:2109.08668).
pub(crate) fn squared_relu(x: &Tensor) -> Result<Tensor> {
    x.apply_op1(SquaredRelu)
}

struct SquaredRelu;

impl CustomOp1 for SquaredRelu {
    fn name(&self) -> &'static str {
        "squared-relu"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = of_dtype!((s, l); |x| forward(x));
        Ok((out, l.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        x.apply_op2_no_bwd(&grad.contiguous()?, &SquaredReluBackward)
            .map(Some)
    }
}

fn forward<T: Real>(x: &[T]) -> Vec<T> {
    let mut out = vec![T::zero(); x.len()];
    let shares = out.par_chunks_mut(SHARE).zip(x.par_chunks(SHARE));
    shares.for_each(|(out, x)| {
        for (out, &x) in out.iter_mut().zip(x) {
            let positive = x.max(T::zero());
            *out = positive * positive;
        }
    });
    out
}

struct SquaredReluBackward;

impl CustomOp2 for SquaredReluBackward {
    fn name(&self) -> &'static str {
        "squared-relu-backward"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = of_dtype!((s1, l1), (s2, l2); |x, grad| backward(x, grad));
        Ok((out, l1.shape().clone()))
    }
}

/// 2·max(x, 0)·g.
fn backward<T: Real>(x: &[T], grad: &[T]) -> Vec<T> {
    let mut out = vec![T::zero(); x.len()];
    let inputs = x.par_chunks(SHARE).zip(grad.par_chunks(SHARE));
    let shares = out.par_chunks_mut(SHARE).zip(inputs);
    shares.for_each(|(out, (x, grad))| {
        for (out, (&x, &grad)) in out.iter_mut().zip(x.iter().zip(grad)) {
            let positive = x.max(T::zero());
            *out = (positive + positive) * grad;
        }
    });
    out
}
