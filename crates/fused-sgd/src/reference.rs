//! The definition of SGD: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← r·g;  g ← g + λ·p if L2
//! u ← μ·u + (1 − τ)·g          τ = 0 at the first step
//! p ← p·(1 − lr·λ) if decoupled
//! p ← p − lr·u, or p − lr·(g + μ·u) with Nesterov
//! ```
//! Sutskever, Martens, Dahl & Hinton 2013, with lr outside the velocity as in PyTorch 2.7.
//! Dampening and the first step are PyTorch's, too.

use fusestep_launch::{Objective, WeightDecay};

use crate::{Nesterov, Sgd};

/// The parameter and the state of one element.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// u; without momentum u is the last gradient and has no effect.
    pub velocity: f64,
}

/// The element after step `step` (from 1) with gradient `grad`.
pub fn update(sgd: &Sgd, step: u64, element: Element, grad: f64) -> Element {
    let mut p = element.param;
    let mut g = match sgd.objective {
        Objective::Minimize => sgd.rescale * grad,
        Objective::Maximize => sgd.rescale * -grad,
    };
    match sgd.weight_decay {
        WeightDecay::L2(lambda) => g += lambda * p,
        WeightDecay::Decoupled(lambda) => p *= 1.0 - sgd.lr * lambda,
    }
    let dampening = if step == 1 { 0.0 } else { sgd.dampening };
    let u = sgd.momentum * element.velocity + (1.0 - dampening) * g;
    p -= match sgd.nesterov {
        Nesterov::Plain => sgd.lr * u,
        Nesterov::Nesterov => sgd.lr * (g + sgd.momentum * u),
    };
    Element { param: p, velocity: u }
}
