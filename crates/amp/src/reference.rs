//! The equations in f64, one element and one step at a time, as PyTorch states them. Tests trust
//! only this file.

/// The norm of all elements of all tensors: √(Σ g²), summed one after the other.
pub fn grad_norm(tensors: &[&[f64]]) -> f64 {
    let mut sum = 0.0;
    for tensor in tensors {
        for g in *tensor {
            sum += g * g;
        }
    }
    sum.sqrt()
}

/// `clip_grad_norm_`: every gradient times min(1, max_norm / (norm + 1e-6)).
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    f64::min(1.0, max_norm / (norm + 1e-6))
}

/// A scaler's state: scale, good steps in a row, bad steps in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaler {
    /// The loss scale.
    pub scale: f64,
    /// Good steps in a row.
    pub good: u32,
    /// Bad steps in a row.
    pub bad: u32,
}

/// PyTorch's `update_loss_scaling`, with a floor and a ceiling, and with thresholds that a restored
/// counter cannot step over.
///
/// Each `(factor, interval, bound)` belongs to growth or to backoff. `found_inf` is 1 for a bad
/// step, else 0.
pub fn update_scale(
    scaler: Scaler,
    found_inf: u32,
    growth: (f64, u32, f64),
    backoff: (f64, u32, f64),
) -> Scaler {
    let Scaler { mut scale, mut good, mut bad } = scaler;
    if found_inf == 1 {
        good = 0;
        bad += 1;
        if bad >= backoff.1 {
            bad = 0;
            scale = f64::max(scale * backoff.0, backoff.2);
        }
    } else {
        bad = 0;
        good += 1;
        if good >= growth.1 {
            good = 0;
            scale = f64::min(scale * growth.0, growth.2);
        }
    }
    Scaler { scale, good, bad }
}
