//! The loss scale and its policy, and the limit of the norm.

use std::fmt;

/// Largest loss scale: both the scale and its reciprocal are normal f32 values.
const LARGEST_SCALE: f64 = 8.507_059_173_023_462e37;

/// Outcome of the finite check on the gradients of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Every element is finite, and so is the norm.
    Finite,
    /// An element or the norm is infinite or NaN: the step is skipped.
    NonFinite,
}

/// Policy by which a loss scale changes; all factors and bounds are powers of two.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ScalePolicy {
    /// Factor after `growth_interval` good steps, at least 1; 2 by default.
    pub growth: f64,
    /// Factor after `backoff_interval` bad steps, at most 1; 0.5 by default.
    pub backoff: f64,
    /// Good steps in a row until the scale grows, at least 1; 2,000 by default.
    pub growth_interval: u32,
    /// Bad steps in a row until the scale shrinks, at least 1; 1 by default.
    pub backoff_interval: u32,
    /// The smallest scale, at least 1; 1 by default.
    pub floor: f64,
    /// The largest scale, at most 2¹²⁶; 2¹²⁶ by default.
    pub ceiling: f64,
}

impl fmt::Display for ScalePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "times {} after {} good steps, times {} after {} bad, from {} to {:e}",
            self.growth,
            self.growth_interval,
            self.backoff,
            self.backoff_interval,
            self.floor,
            self.ceiling
        )
    }
}

impl ScalePolicy {
    /// Whether the scale never changes.
    pub fn is_fixed(&self) -> bool {
        self.growth == 1.0 && self.backoff == 1.0
    }
}

impl Default for ScalePolicy {
    fn default() -> Self {
        Self {
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 2000,
            backoff_interval: 1,
            floor: 1.0,
            ceiling: LARGEST_SCALE,
        }
    }
}

/// Loss scale: the factor on a loss that keeps 16-bit gradients from vanishing. It also holds the
/// counters that decide its next value.
///
/// # Source
/// Micikevicius et al. 2018, arXiv:1710.03740; the defaults are PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LossScale {
    scale: f64,
    good_steps: u32,
    bad_steps: u32,
    policy: ScalePolicy,
}

impl LossScale {
    /// Loss scale that starts at 65,536 and changes by the default [`ScalePolicy`].
    pub fn dynamic() -> Self {
        Self { scale: 65_536.0, good_steps: 0, bad_steps: 0, policy: ScalePolicy::default() }
    }

    /// Loss scale of 1 that never changes.
    pub fn unscaled() -> Self {
        Self {
            scale: 1.0,
            policy: ScalePolicy { growth: 1.0, backoff: 1.0, ..ScalePolicy::default() },
            ..Self::dynamic()
        }
    }

    /// Loss scale of `scale` that never changes.
    ///
    /// # Errors
    /// [`AmpError::PowerOfTwo`] unless `scale` is a power of two in 1 … 2¹²⁶.
    pub fn fixed(scale: f64) -> Result<Self, AmpError> {
        Self::with_policy(scale, Self::unscaled().policy)
    }

    /// Loss scale that starts at `scale` and changes by `policy`.
    ///
    /// # Errors
    /// [`AmpError::PowerOfTwo`] or [`AmpError::Interval`] naming the first value out of range.
    pub fn with_policy(scale: f64, policy: ScalePolicy) -> Result<Self, AmpError> {
        let ScalePolicy { growth, backoff, growth_interval, backoff_interval, floor, ceiling } =
            policy;
        power_of_two("loss scale", scale, (1.0, LARGEST_SCALE))?;
        power_of_two("growth", growth, (1.0, LARGEST_SCALE))?;
        power_of_two("backoff", backoff, (1.0 / LARGEST_SCALE, 1.0))?;
        power_of_two("floor", floor, (1.0, scale))?;
        power_of_two("ceiling", ceiling, (scale, LARGEST_SCALE))?;
        for (what, found) in
            [("growth interval", growth_interval), ("backoff interval", backoff_interval)]
        {
            if found == 0 {
                return Err(AmpError::Interval { what });
            }
        }
        Ok(Self { scale, good_steps: 0, bad_steps: 0, policy })
    }

    /// This policy with a scale and counters from a checkpoint; a counter may be above its
    /// interval. A scale that never changes keeps its value.
    ///
    /// # Errors
    /// [`AmpError::PowerOfTwo`] if `scale` is no power of two between the policy's floor and
    /// ceiling.
    pub fn restored(self, scale: f64, good_steps: u32, bad_steps: u32) -> Result<Self, AmpError> {
        if self.policy.is_fixed() {
            return Ok(Self { good_steps, bad_steps, ..self });
        }
        let bounds = (self.policy.floor, self.policy.ceiling);
        power_of_two("loss scale", scale, bounds)?;
        Ok(Self { scale, good_steps, bad_steps, ..self })
    }

    /// The factor on the next step's loss.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Good steps since the scale changed or a step was skipped.
    pub fn good_steps(&self) -> u32 {
        self.good_steps
    }

    /// Skipped steps since the scale changed or a step was applied.
    pub fn bad_steps(&self) -> u32 {
        self.bad_steps
    }

    /// The policy by which the scale changes.
    pub fn policy(&self) -> ScalePolicy {
        self.policy
    }

    /// The scale after a step; no other function changes a scale.
    ///
    /// ```text
    /// non-finite   good ← 0, bad ← bad + 1;
    ///              if bad ≥ backoff_interval: scale ← max(scale·backoff, floor), bad ← 0
    /// finite       bad ← 0, good ← good + 1;
    ///              if good ≥ growth_interval: scale ← min(scale·growth, ceiling), good ← 0
    /// ```
    #[must_use]
    pub fn after(self, found: Finding) -> Self {
        let policy = self.policy;
        let mut next = self;
        match found {
            Finding::NonFinite => {
                next.good_steps = 0;
                next.bad_steps = self.bad_steps.saturating_add(1);
                if next.bad_steps >= policy.backoff_interval {
                    next.scale = (self.scale * policy.backoff).max(policy.floor);
                    next.bad_steps = 0;
                }
            }
            Finding::Finite => {
                next.bad_steps = 0;
                next.good_steps = self.good_steps.saturating_add(1);
                if next.good_steps >= policy.growth_interval {
                    next.scale = (self.scale * policy.growth).min(policy.ceiling);
                    next.good_steps = 0;
                }
            }
        }
        next
    }
}

/// Largest norm of gradients; gradients with a larger norm are scaled down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxNorm(f64);

impl MaxNorm {
    /// No limit: the clip factor is 1.
    pub const UNLIMITED: MaxNorm = MaxNorm(f64::INFINITY);

    /// A limit of the norm.
    ///
    /// # Errors
    /// [`AmpError::MaxNorm`] unless `max_norm` is finite and above 0.
    pub fn new(max_norm: f64) -> Result<Self, AmpError> {
        if max_norm.is_finite() && max_norm > 0.0 {
            return Ok(Self(max_norm));
        }
        Err(AmpError::MaxNorm { found: max_norm })
    }

    /// The limit; infinite if there is none.
    pub fn value(self) -> f64 {
        self.0
    }

    /// The factor that brings a norm to the limit: min(1, max_norm / (norm + 10⁻⁶)), in f64.
    ///
    /// # Source
    /// PyTorch's `clip_grad_norm_`.
    pub fn clip_factor(self, norm: f64) -> f64 {
        let factor = self.0 / (norm + CLIP_EPS);
        if factor < 1.0 { factor } else { 1.0 }
    }
}

/// Summand to the norm before the division by it, as in PyTorch.
const CLIP_EPS: f64 = 1e-6;

fn power_of_two(what: &'static str, found: f64, bounds: (f64, f64)) -> Result<(), AmpError> {
    // A power of two in a normal f64 has no bits set in its fraction.
    let fraction = found.to_bits() & ((1 << 52) - 1);
    if found.is_normal() && fraction == 0 && found >= bounds.0 && found <= bounds.1 {
        return Ok(());
    }
    Err(AmpError::PowerOfTwo { what, least: bounds.0, most: bounds.1, found })
}

/// Error of a loss scale or a limit of the norm.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AmpError {
    /// A value that must be a power of two in a range is not.
    #[error("{what}: expected a power of two from {least:e} to {most:e}, found {found}")]
    PowerOfTwo {
        /// Name of the value.
        what: &'static str,
        /// The smallest allowed value.
        least: f64,
        /// The largest allowed value.
        most: f64,
        /// The value given.
        found: f64,
    },
    /// An interval of 0 steps.
    #[error("{what}: expected at least 1 step, found 0")]
    Interval {
        /// Name of the interval.
        what: &'static str,
    },
    /// A limit of the norm that is not finite or not above 0.
    #[error(
        "max_norm: expected a finite value above 0, found {found}; leave the pass out to clip \
         nothing"
    )]
    MaxNorm {
        /// The value given.
        found: f64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_no_powers_of_two_are_named() {
        for bad in [0.0, -2.0, 3.0, 0.5, f64::NAN, f64::INFINITY, 1e300] {
            let error = LossScale::fixed(bad).unwrap_err().to_string();
            assert!(error.starts_with("loss scale: expected a power of two from 1e0"), "{error}");
        }
        assert_eq!(LARGEST_SCALE, 2f64.powi(126));
        assert!(LossScale::fixed(LARGEST_SCALE).is_ok());
        let policy = ScalePolicy::default();
        for (bad, what) in [
            (ScalePolicy { growth: 1.5, ..policy }, "growth:"),
            (ScalePolicy { backoff: 0.8, ..policy }, "backoff:"),
            (ScalePolicy { floor: 32.0, ..policy }, "floor:"),
            (ScalePolicy { ceiling: 8.0, ..policy }, "ceiling:"),
            (ScalePolicy { growth_interval: 0, ..policy }, "growth interval:"),
            (ScalePolicy { backoff_interval: 0, ..policy }, "backoff interval:"),
        ] {
            let error = LossScale::with_policy(16.0, bad).unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
    }

    #[test]
    fn counters_above_their_interval_fire_at_once() {
        let grown = LossScale::dynamic().restored(4.0, 5000, 0).unwrap();
        assert_eq!(grown.after(Finding::Finite).scale(), 8.0);
        let worn = LossScale::dynamic().restored(4.0, 0, u32::MAX).unwrap();
        assert_eq!(worn.after(Finding::NonFinite).scale(), 2.0);
    }

    #[test]
    fn floor_and_ceiling_hold() {
        let policy =
            ScalePolicy { growth_interval: 1, floor: 2.0, ceiling: 8.0, ..ScalePolicy::default() };
        let mut scale = LossScale::with_policy(4.0, policy).unwrap();
        for expected in [8.0, 8.0] {
            scale = scale.after(Finding::Finite);
            assert_eq!(scale.scale(), expected);
        }
        for expected in [4.0, 2.0, 2.0] {
            scale = scale.after(Finding::NonFinite);
            assert_eq!(scale.scale(), expected);
        }
    }

    #[test]
    fn clipping_is_torchs() {
        let max = MaxNorm::new(1.0).unwrap();
        assert_eq!(max.clip_factor(0.5), 1.0);
        assert_eq!(max.clip_factor(4.0), 1.0 / (4.0 + 1e-6));
        assert_eq!(MaxNorm::UNLIMITED.clip_factor(1e300), 1.0);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(MaxNorm::new(bad).is_err());
        }
    }
}
