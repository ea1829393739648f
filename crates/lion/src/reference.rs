//! The definition: f64, scalar, one element at a time.
//!
//! ```text
//! g ← −g if maximize
//! c ← β₁·m + (1 − β₁)·g
//! p ← p·(1 − lr·λ) − lr·sign(c)        sign(0) = 0
//! m ← β₂·m + (1 − β₂)·g
//! ```
//! Chen et al. 2023, Algorithm 2 (arXiv:2302.06675).

use fusestep_launch::Objective;

use crate::Lion;

/// One element's parameter and state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub param: f64,
    /// m.
    pub moment1: f64,
}

/// The element after a step with gradient `grad`; every step is alike.
pub fn update(lion: &Lion, element: Element, grad: f64) -> Element {
    let Element { param: p, moment1: m } = element;
    let g = match lion.objective {
        Objective::Minimize => grad,
        Objective::Maximize => -grad,
    };
    let c = lion.beta1 * m + (1.0 - lion.beta1) * g;
    let sign = if c == 0.0 { 0.0 } else { c.signum() };
    Element {
        param: p * (1.0 - lion.lr * lion.weight_decay) - lion.lr * sign,
        moment1: lion.beta2 * m + (1.0 - lion.beta2) * g,
    }
}

/// How near the direction c is to 0, where its sign may fall either way: |c| over the sum of the
/// magnitudes of its terms.
pub fn certainty(lion: &Lion, element: Element, grad: f64) -> f64 {
    let (m, g) = (lion.beta1 * element.moment1, (1.0 - lion.beta1) * grad);
    let g = match lion.objective {
        Objective::Minimize => g,
        Objective::Maximize => -g,
    };
    (m + g).abs() / (m.abs() + g.abs())
}
