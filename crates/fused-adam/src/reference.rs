//! The definition: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← g + λ·p if L2
//! m ← β₁·m + (1 − β₁)·g     v ← β₂·v + (1 − β₂)·g²     w ← v, or the largest v so far (AMSGrad)
//! p ← p·(1 − lr·λ) if decoupled
//! p ← p − lr/(1 − β₁ᵗ) · m / (√w/√(1 − β₂ᵗ) + ε)
//! ```
//! Kingma & Ba 2015, Algorithm 1 (arXiv:1412.6980); Loshchilov & Hutter 2019, Algorithm 2
//! (arXiv:1711.05101), with λ multiplied by lr as PyTorch does; Reddi, Kale & Kumar 2018 (AMSGrad).

use crate::{Adam, Objective, SecondMoment, WeightDecay};

/// One element's parameter and state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// m.
    pub moment1: f64,
    /// v.
    pub moment2: f64,
    /// Largest v so far; untouched without AMSGrad.
    pub max_moment2: f64,
}

/// The element after step `step` (from 1) with gradient `grad`.
pub fn update(adam: &Adam, step: u64, element: Element, grad: f64) -> Element {
    let t = step as f64;
    let mut p = element.param;
    let mut g = match adam.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    match adam.weight_decay {
        WeightDecay::L2(lambda) => g += lambda * p,
        WeightDecay::Decoupled(lambda) => p *= 1.0 - adam.lr * lambda,
    }
    let m = adam.beta1 * element.moment1 + (1.0 - adam.beta1) * g;
    let v = adam.beta2 * element.moment2 + (1.0 - adam.beta2) * g * g;
    let (w, max_moment2) = match adam.second_moment {
        SecondMoment::Running => (v, element.max_moment2),
        SecondMoment::Largest => (v.max(element.max_moment2), v.max(element.max_moment2)),
    };
    let m_hat = m / (1.0 - adam.beta1.powf(t));
    let w_hat = w / (1.0 - adam.beta2.powf(t));
    p -= adam.lr * m_hat / (w_hat.sqrt() + adam.eps);
    Element { param: p, moment1: m, moment2: v, max_moment2 }
}
