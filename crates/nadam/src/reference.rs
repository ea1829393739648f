//! The definition of NAdam: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← g + λ·p if L2;  p ← p·(1 − lr·λ) if decoupled
//! μ(t) = β₁·(1 − 0.96^(t·ψ) / 2)        P = μ(1)·μ(2)·…·μ(t)
//! m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²        d = √(v / (1 − β₂ᵗ)) + ε
//! p ← p − lr·(1 − μ(t)) / (1 − P) · g / d − lr·μ(t + 1) / (1 − P·μ(t + 1)) · m / d
//! ```
//! Dozat 2016, Algorithm 8 of "Incorporating Nesterov Momentum into Adam"; decay of weights and ψ
//! are as in PyTorch 2.7.

use fusestep_launch::{Objective, WeightDecay};

use crate::NAdam;

/// The parameter and the state of one element.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// m.
    pub moment1: f64,
    /// v.
    pub moment2: f64,
}

/// The element after step `t` with gradient `grad`.
pub fn update(nadam: &NAdam, t: u64, element: Element, grad: f64) -> Element {
    let Element { param: mut p, moment1: m, moment2: v } = element;
    let mut g = match nadam.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    match nadam.weight_decay {
        WeightDecay::L2(lambda) => g += lambda * p,
        WeightDecay::Decoupled(lambda) => p *= 1.0 - nadam.lr * lambda,
    }
    let momentum =
        |t: u64| nadam.beta1 * (1.0 - 0.5 * 0.96f64.powf(t as f64 * nadam.momentum_decay));
    let product: f64 = (1..=t).map(momentum).product();
    let (own, next) = (momentum(t), momentum(t + 1));
    let m = nadam.beta1 * m + (1.0 - nadam.beta1) * g;
    let v = nadam.beta2 * v + (1.0 - nadam.beta2) * g * g;
    let d = (v / (1.0 - nadam.beta2.powf(t as f64))).sqrt() + nadam.eps;
    p -= nadam.lr * (1.0 - own) / (1.0 - product) * g / d;
    p -= nadam.lr * next / (1.0 - product * next) * m / d;
    Element { param: p, moment1: m, moment2: v }
}
