//! Heads of attention put apart, and together again.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::{Real, of_dtype};

/// How positions and heads lie.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    /// Sequences.
    pub(crate) batch: usize,
    /// Positions of a sequence.
    pub(crate) length: usize,
    /// Heads of a position.
    pub(crate) heads: usize,
    /// Elements of a head.
    pub(crate) width: usize,
}

/// `[batch·length, heads·width]` as `[batch·heads, length, width]`.
pub(crate) fn apart(x: &Tensor, heads: Heads) -> Result<Tensor> {
    x.apply_op1(Apart(heads))
}

/// The inverse of [`apart`].
pub(crate) fn together(x: &Tensor, heads: Heads) -> Result<Tensor> {
    x.apply_op1(Together(heads))
}

struct Apart(Heads);
struct Together(Heads);

impl CustomOp1 for Apart {
    fn name(&self) -> &'static str {
        "heads-apart"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let own = self.0;
        let out = of_dtype!((s, l); |x| swapped(x, [own.length, own.heads], own.width));
        let shape = (own.batch * own.heads, own.length, own.width);
        Ok((out, Shape::from(shape)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        together(&grad.contiguous()?, self.0).map(Some)
    }
}

impl CustomOp1 for Together {
    fn name(&self) -> &'static str {
        "heads-together"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let own = self.0;
        let out = of_dtype!((s, l); |x| swapped(x, [own.heads, own.length], own.width));
        let shape = (own.batch * own.length, own.heads * own.width);
        Ok((out, Shape::from(shape)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        apart(&grad.contiguous()?, self.0).map(Some)
    }
}

/// `[…, rows, columns, width]` as `[…, columns, rows, width]`.
fn swapped<T: Real>(x: &[T], [rows, columns]: [usize; 2], width: usize) -> Vec<T> {
    let mut out = vec![T::zero(); x.len()];
    let matrix = rows * columns * width;
    let matrices = out.par_chunks_mut(matrix).zip(x.par_chunks(matrix));
    matrices.for_each(|(out, x)| {
        for (column, out) in out.chunks_mut(rows * width).enumerate() {
            for (row, out) in out.chunks_mut(width).enumerate() {
                let at = (row * columns + column) * width;
                out.copy_from_slice(&x[at..at + width]);
            }
        }
    });
    out
}
