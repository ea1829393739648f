//! The definition of Adagrad: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← g + λ·p
//! s ← s + g²                                              s starts at the initial value
//! p ← p − lr / (1 + (t − 1)·lr_decay) · g / (√s + ε)
//! ```
//! Duchi, Hazan & Singer 2011, with the diagonal of their matrix. ε, the decay of lr and the
//! initial value are as in PyTorch 2.7.

use fusestep_launch::Objective;

use crate::Adagrad;

/// The parameter and the state of one element.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// s; 0 before the first step, which adds the initial value.
    pub sum: f64,
}

/// The element after step `step` (from 1) with gradient `grad`.
pub fn update(adagrad: &Adagrad, step: u64, element: Element, grad: f64) -> Element {
    let Element { param: p, mut sum } = element;
    let mut g = match adagrad.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    g += adagrad.weight_decay * p;
    if step == 1 {
        sum += adagrad.initial_sum;
    }
    sum += g * g;
    let lr = adagrad.lr / (1.0 + (step - 1) as f64 * adagrad.lr_decay);
    Element { param: p - lr * g / (sum.sqrt() + adagrad.eps), sum }
}
