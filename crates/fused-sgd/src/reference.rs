//! The definition: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← r·g;  g ← g + λ·p if L2
//! u ← μ·u + (1 − τ)·g          τ = 0 at the first step
//! p ← p·(1 − lr·λ) if decoupled
//! p ← p − lr·u, or p − lr·(g + μ·u) with Nesterov
//! ```
//! Sutskever, Martens, Dahl & Hinton 2013, with lr outside of the velocity as PyTorch 2.7 does;
//! dampening and the first step are PyTorch's too.

use fusestep_launch::{Objective, WeightDecay};

use crate::{Nesterov, Sgd};

/// One element's parameter and state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// u; without momentum it is the last gradient and of no effect.
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
    Element {
        param: p,
        velocity: u,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// p = 1, g = 0.5, u = 0.2, μ = 0.9, lr = 0.1, λ = 0.1, by hand.
    #[test]
    fn worked_examples() {
        let start = Element {
            param: 1.0,
            velocity: 0.2,
        };
        let plain = Sgd {
            lr: 0.1,
            weight_decay: WeightDecay::L2(0.1),
            ..Sgd::with_momentum()
        };
        let nesterov = Sgd {
            nesterov: Nesterov::Nesterov,
            ..plain
        };
        let lone = Sgd {
            lr: 0.1,
            ..Sgd::default()
        };
        for (sgd, param) in [(plain, 0.922), (nesterov, 0.8698), (lone, 0.95)] {
            let found = update(&sgd, 2, start, 0.5);
            assert!((found.param - param).abs() < 1e-15, "{sgd:?}: {found:?}");
        }
        assert!((update(&plain, 2, start, 0.5).velocity - 0.78).abs() < 1e-15);
    }
}
