//! The definition: f64, scalar, one element at a time, with the average x written out.
//!
//! ```text
//! y_t = (1 − β₁)·z_t + β₁·x_t                             where the gradient is taken
//! v ← β₂·v + (1 − β₂)·g²
//! n = g / (√(v / (1 − β₂ᵗ)) + ε) + λ·y_t
//! z ← z − γ_t·n                                           γ_t = lr·min(1, t / warm-up)
//! c = γ_t² / Σ γ_i²                                       i = 1 … t
//! x ← (1 − c)·x + c·z
//! ```
//! Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682, algorithm 1; defaults and
//! weights of the average as in the authors' package, version 1.4.1, with r = 0 and a power of 2.

use crate::ScheduleFree;

/// One element's parameter and state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// y: the parameter as training has it.
    pub param: f64,
    /// v.
    pub moment2: f64,
    /// z; set to the parameter at step 1.
    pub base: f64,
}

impl Element {
    /// x: the parameter as it is evaluated, from y and z.
    pub fn average(&self, rule: &ScheduleFree) -> f64 {
        (self.param - (1.0 - rule.beta1) * self.base) / rule.beta1
    }
}

/// The element after step `step`, counted from 1, with gradient `grad`.
pub fn update(rule: &ScheduleFree, step: u64, element: Element, grad: f64) -> Element {
    let base = if step == 1 { element.param } else { element.base };
    let average = Element { base, ..element }.average(rule);
    let warmed = |step: u64| match rule.warmup_steps {
        0 => 1.0,
        steps => (step as f64 / f64::from(steps)).min(1.0),
    };
    let rate = rule.lr * warmed(step);
    let weights: f64 = (1..=step).map(|step| warmed(step).powi(2)).sum();
    let moment2 = rule.beta2 * element.moment2 + (1.0 - rule.beta2) * grad * grad;
    let corrected = moment2 / (1.0 - rule.beta2.powf(step as f64));
    let direction = grad / (corrected.sqrt() + rule.eps) + rule.weight_decay * element.param;
    let base = base - rate * direction;
    let share = warmed(step).powi(2) / weights;
    let average = (1.0 - share) * average + share * base;
    Element { param: (1.0 - rule.beta1) * base + rule.beta1 * average, moment2, base }
}
