//! The definition of Adamax: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← g + λ·p
//! m ← β₁·m + (1 − β₁)·g        u ← max(β₂·u, |g| + ε)
//! p ← p − lr / (1 − β₁ᵗ) · m / u
//! ```
//! Kingma & Ba 2015, Algorithm 2 (arXiv:1412.6980). ε, which the paper does not have, and L2 decay
//! are as in PyTorch 2.7.

use fusestep_launch::Objective;

use crate::Adamax;

/// The parameter and the state of one element.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// m.
    pub moment1: f64,
    /// u.
    pub max_grad: f64,
}

/// The element after step `t` with gradient `grad`.
pub fn update(adamax: &Adamax, t: u64, element: Element, grad: f64) -> Element {
    let Element { param: p, moment1: m, max_grad: u } = element;
    let mut g = match adamax.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    g += adamax.weight_decay * p;
    let m = adamax.beta1 * m + (1.0 - adamax.beta1) * g;
    let u = (adamax.beta2 * u).max(g.abs() + adamax.eps);
    let rate = adamax.lr / (1.0 - adamax.beta1.powf(t as f64));
    Element { param: p - rate * m / u, moment1: m, max_grad: u }
}
