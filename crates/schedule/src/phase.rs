//! One phase of a schedule.

use core::f64::consts::PI;
use core::num::NonZeroU64;

use crate::{MOST_FACTOR, ScheduleError};

/// One phase of a schedule: a factor on the learning rate at each of the phase's own steps t = 0,
/// 1, ….
///
/// At t = `steps` and beyond a phase has the factor at t = `steps`. That factor remains if no phase
/// follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// The factor at every step.
    Constant {
        /// Number of steps; `None` for a phase without an end.
        steps: Option<u64>,
        /// Factor on the base rate, from 0 to [`MOST_FACTOR`].
        factor: f64,
    },
    /// from + (to − from)·t/steps.
    Linear {
        /// Number of steps.
        steps: u64,
        /// Factor of the first step, from 0 to [`MOST_FACTOR`].
        from: f64,
        /// Factor once the steps are over, from 0 to [`MOST_FACTOR`].
        to: f64,
    },
    /// floor + (1 − floor)·(1 + cos(π·t/steps))/2 (Loshchilov & Hutter 2017, arXiv:1608.03983,
    /// without restarts).
    Cosine {
        /// Number of steps.
        steps: u64,
        /// Factor once the steps are over, in [0, 1].
        floor: f64,
    },
    /// floor + (1 − floor)·(1 − t/steps)^power: with power 2 the decay of the LARS papers.
    Polynomial {
        /// Number of steps.
        steps: u64,
        /// Exponent, at least 0; 1 is a line.
        power: f64,
        /// Factor once the steps are over, in [0, 1].
        floor: f64,
    },
    /// gamma^⌊t/every⌋.
    Step {
        /// Steps between two changes.
        every: NonZeroU64,
        /// Factor of a change, at least 0; above 1 only with `steps`.
        gamma: f64,
        /// Number of steps; `None` for a phase without an end.
        steps: Option<u64>,
    },
}

impl Phase {
    /// The phase of [`crate::Schedule::warmup`].
    pub(crate) fn warmup(steps: u64) -> Self {
        Phase::Linear { steps, from: 1.0 / (steps as f64 + 1.0), to: 1.0 }
    }

    /// The number of steps of the phase; `None` if it has no end.
    pub fn steps(&self) -> Option<u64> {
        match self {
            Phase::Linear { steps, .. }
            | Phase::Cosine { steps, .. }
            | Phase::Polynomial { steps, .. } => Some(*steps),
            Phase::Constant { steps, .. } | Phase::Step { steps, .. } => *steps,
        }
    }

    /// The factor at `step`, counted from the phase's beginning.
    pub fn factor(&self, step: u64) -> f64 {
        let t = self.steps().map_or(step, |steps| step.min(steps));
        match self {
            Phase::Constant { factor, .. } => *factor,
            Phase::Linear { steps, from, to } => {
                if t == *steps {
                    // The last factor must be exact, without the error of rounding.
                    return *to;
                }
                from + (to - from) * share(t, *steps)
            }
            Phase::Cosine { steps, floor } => {
                floor + (1.0 - floor) * (1.0 + libm::cos(PI * share(t, *steps))) / 2.0
            }
            Phase::Polynomial { steps, power, floor } => {
                floor + (1.0 - floor) * libm::pow(1.0 - share(t, *steps), *power)
            }
            Phase::Step { every, gamma, .. } => libm::pow(*gamma, (t / every.get()) as f64),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Phase::Constant { .. } => "constant",
            Phase::Linear { .. } => "linear",
            Phase::Cosine { .. } => "cosine",
            Phase::Polynomial { .. } => "polynomial",
            Phase::Step { .. } => "step",
        }
    }

    pub(crate) fn validate(&self, index: usize) -> Result<(), ScheduleError> {
        let check = |what, range: Range, found| self.check(index, what, range, found);
        match *self {
            Phase::Constant { factor, .. } => check("factor", Range::Factor, factor),
            Phase::Linear { from, to, .. } => {
                check("from", Range::Factor, from)?;
                check("to", Range::Factor, to)
            }
            Phase::Cosine { floor, .. } => check("floor", Range::Share, floor),
            Phase::Polynomial { power, floor, .. } => {
                check("power", Range::Power, power)?;
                check("floor", Range::Share, floor)
            }
            Phase::Step { gamma, .. } => check("gamma", Range::Gamma, gamma),
        }
    }

    fn check(
        &self,
        index: usize,
        what: &'static str,
        range: Range,
        found: f64,
    ) -> Result<(), ScheduleError> {
        let (holds, expected) = match range {
            Range::Share => (found <= 1.0, "a number from 0 to 1"),
            Range::Factor => (found <= MOST_FACTOR, "a number from 0 to 1e6"),
            Range::Power => (true, "a finite number of at least 0"),
            // A gamma above 1 makes the last factor the largest.
            Range::Gamma => (
                found <= 1.0 || self.steps().is_some_and(|end| self.factor(end) <= MOST_FACTOR),
                "a number from 0 to 1, or STEPS after which its factor is at most 1e6",
            ),
        };
        if holds && found >= 0.0 && found.is_finite() {
            return Ok(());
        }
        Err(ScheduleError::Range { index, phase: self.name(), what, expected, found })
    }
}

/// Range of a number of a phase, which is also finite and at least 0.
enum Range {
    Share,
    Factor,
    Power,
    Gamma,
}

/// The share of a phase that is over at step `t`; all of a phase without steps.
fn share(t: u64, steps: u64) -> f64 {
    match steps {
        0 => 1.0,
        steps => t as f64 / steps as f64,
    }
}
