//! The definition of LARS: f64, one tensor at a time.
//!
//! ```text
//! P = ‖p‖        G = rescale·‖g‖
//! local = lr·η·P / (G + λ·P + ε) if trusted, P > 0 and G > 0, else lr
//! u ← μ·u + local·(rescale·g + λ·p)        p ← p − u
//! ```
//! You, Gitman & Ginsburg 2017 (arXiv:1708.03888), with lr inside the velocity, as in PaddlePaddle.

use fusestep_tensor::Trust;

use crate::Lars;

/// The tensor's learning rate; `lars` holds the tensor's own lr and λ.
pub fn local_rate(lars: &Lars, trust: Trust, param: &[f64], grad: &[f64]) -> f64 {
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (p, g) = (norm(param), lars.rescale * norm(grad));
    if trust == Trust::Ratio && p > 0.0 && g > 0.0 {
        lars.lr * lars.trust_coefficient * p / (g + lars.weight_decay * p + lars.eps)
    } else {
        lars.lr
    }
}

/// Applies one step to one tensor. If its norms or its rate are not finite, the tensor stays as it
/// is and the result is `false`.
pub fn update(
    lars: &Lars,
    trust: Trust,
    param: &mut [f64],
    grad: &[f64],
    velocity: &mut [f64],
) -> bool {
    let local = local_rate(lars, trust, param, grad);
    let finite = |values: &[f64]| values.iter().all(|x| x.is_finite());
    if !(finite(param) && finite(grad) && local.is_finite()) {
        return false;
    }
    for ((p, &g), u) in param.iter_mut().zip(grad).zip(velocity) {
        *u = lars.momentum * *u + local * (lars.rescale * g + lars.weight_decay * *p);
        *p -= *u;
    }
    true
}
