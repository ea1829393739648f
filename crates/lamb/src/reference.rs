//! The definition of LAMB: f64, one tensor at a time.
//!
//! ```text
//! m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
//! r = m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε) + λ·p
//! p ← p − lr·φ·r        φ = ‖p‖/‖r‖ if trusted and neither is 0, else 1
//! ```
//! You et al. 2020, Algorithm 2 (arXiv:1904.00962), with φ the identity on norms and the bias
//! correction of Adam.

use fusestep_tensor::Trust;

use crate::Lamb;

/// The parameter and the state of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor {
    /// p.
    pub param: Vec<f64>,
    /// m.
    pub moment1: Vec<f64>,
    /// v.
    pub moment2: Vec<f64>,
}

/// Applies step `step` (from 1) to one tensor. If its norms or its rate are not finite, the tensor
/// stays as it is and the result is `false`. `lamb` holds the tensor's own lr and λ.
pub fn update(lamb: &Lamb, trust: Trust, step: u64, tensor: &mut Tensor, grad: &[f64]) -> bool {
    let t = step as f64;
    let mut new = tensor.clone();
    let mut direction = vec![0.0; grad.len()];
    for (i, &g) in grad.iter().enumerate() {
        new.moment1[i] = lamb.beta1 * new.moment1[i] + (1.0 - lamb.beta1) * g;
        new.moment2[i] = lamb.beta2 * new.moment2[i] + (1.0 - lamb.beta2) * g * g;
        let m_hat = new.moment1[i] / (1.0 - lamb.beta1.powf(t));
        let v_hat = new.moment2[i] / (1.0 - lamb.beta2.powf(t));
        direction[i] = m_hat / (v_hat.sqrt() + lamb.eps) + lamb.weight_decay * new.param[i];
    }
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (p, r) = (norm(&new.param), norm(&direction));
    let ratio = match trust {
        Trust::Ratio if p > 0.0 && r > 0.0 => p / r,
        _ => 1.0,
    };
    if !(p.is_finite() && r.is_finite() && (lamb.lr * ratio).is_finite()) {
        return false;
    }
    for (p, r) in new.param.iter_mut().zip(direction) {
        *p -= lamb.lr * ratio * r;
    }
    *tensor = new;
    true
}
