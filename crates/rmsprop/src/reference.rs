//! The definition of RMSprop: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize;  g ← g + λ·p
//! v ← α·v + (1 − α)·g²
//! a ← α·a + (1 − α)·g;  s = max(v − a², 0) if centered, else s = v
//! b ← μ·b + g / (√s + ε)
//! p ← p − lr·b
//! ```
//! Tieleman & Hinton 2012 (lecture 6.5), centered as in Graves 2013 (arXiv:1308.0850). ε outside
//! the root, momentum and L2 decay are as in PyTorch 2.7. If rounding makes v − a² negative,
//! PyTorch's parameter becomes NaN; here the variance is 0.

use fusestep_launch::Objective;

use crate::{Centering, RmsProp};

/// The parameter and the state of one element.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// v.
    pub moment2: f64,
    /// a; 0 unless centered.
    pub moment1: f64,
    /// b; 0 without momentum.
    pub velocity: f64,
}

/// The element after a step with gradient `grad`; every step is alike.
pub fn update(rmsprop: &RmsProp, element: Element, grad: f64) -> Element {
    let alpha = rmsprop.alpha;
    let mut g = match rmsprop.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    g += rmsprop.weight_decay * element.param;
    let mut new = element;
    new.moment2 = alpha * element.moment2 + (1.0 - alpha) * g * g;
    let mut variance = new.moment2;
    if rmsprop.centering == Centering::Centered {
        new.moment1 = alpha * element.moment1 + (1.0 - alpha) * g;
        variance = (new.moment2 - new.moment1 * new.moment1).max(0.0);
    }
    let mut step = g / (variance.sqrt() + rmsprop.eps);
    if rmsprop.has_velocity() {
        new.velocity = rmsprop.momentum * element.velocity + step;
        step = new.velocity;
    }
    new.param = element.param - rmsprop.lr * step;
    new
}
