//! One phase of a schedule.

use core::f64::consts::PI;
use core::num::NonZeroU64;

use crate::ScheduleError;

/// One phase of a schedule: a curve over steps t = 0, 1, … of its own, and how many it takes.
///
/// At t = `steps` and beyond a phase has the factor at t = `steps`; that is what remains if no
/// phase follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// The factor at every step.
    Constant {
        /// How many steps; for ever if `None`.
        steps: Option<u64>,
        /// Factor on the base rate, at least 0.
        factor: f64,
    },
    /// from + (to − from)·t/steps.
    Linear {
        /// How many steps.
        steps: u64,
        /// Factor of the first step, at least 0.
        from: f64,
        /// Factor once the steps are over, at least 0.
        to: f64,
    },
    /// floor + (1 − floor)·(1 + cos(π·t/steps))/2 (Loshchilov & Hutter 2017, arXiv:1608.03983,
    /// without restarts).
    Cosine {
        /// How many steps.
        steps: u64,
        /// Factor once the steps are over, in [0, 1].
        floor: f64,
    },
    /// floor + (1 − floor)·(1 − t/steps)^power: with power 2 the decay of the LARS papers.
    Polynomial {
        /// How many steps.
        steps: u64,
        /// At least 0; 1 is a line.
        power: f64,
        /// Factor once the steps are over, in [0, 1].
        floor: f64,
    },
    /// gamma^⌊t/every⌋.
    Step {
        /// Steps between two changes.
        every: NonZeroU64,
        /// Factor of a change, at least 0.
        gamma: f64,
        /// How many steps; for ever if `None`.
        steps: Option<u64>,
    },
}

impl Phase {
    /// As [`crate::Schedule::warmup`].
    pub(crate) fn warmup(steps: u64) -> Self {
        Phase::Linear {
            steps,
            from: 1.0 / (steps as f64 + 1.0),
            to: 1.0,
        }
    }

    /// How many steps it takes; `None` if it has no end.
    pub fn steps(&self) -> Option<u64> {
        match self {
            Phase::Linear { steps, .. }
            | Phase::Cosine { steps, .. }
            | Phase::Polynomial { steps, .. } => Some(*steps),
            Phase::Constant { steps, .. } | Phase::Step { steps, .. } => *steps,
        }
    }

    /// The factor at this step of its own.
    pub fn factor(&self, step: u64) -> f64 {
        let t = self.steps().map_or(step, |steps| step.min(steps));
        match self {
            Phase::Constant { factor, .. } => *factor,
            Phase::Linear { steps, from, to } => {
                if t == *steps {
                    // Rounding must not leave the end a little beside it.
                    return *to;
                }
                from + (to - from) * share(t, *steps)
            }
            Phase::Cosine { steps, floor } => {
                floor + (1.0 - floor) * (1.0 + libm::cos(PI * share(t, *steps))) / 2.0
            }
            Phase::Polynomial {
                steps,
                power,
                floor,
            } => floor + (1.0 - floor) * libm::pow(1.0 - share(t, *steps), *power),
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
        let (most, any) = (1.0, f64::INFINITY);
        match self {
            Phase::Constant { factor, .. } => self.check(index, "factor", *factor, any),
            Phase::Linear { from, to, .. } => {
                self.check(index, "from", *from, any)?;
                self.check(index, "to", *to, any)
            }
            Phase::Cosine { floor, .. } => self.check(index, "floor", *floor, most),
            Phase::Polynomial { power, floor, .. } => {
                self.check(index, "power", *power, any)?;
                self.check(index, "floor", *floor, most)
            }
            Phase::Step { gamma, .. } => self.check(index, "gamma", *gamma, any),
        }
    }

    fn check(
        &self,
        index: usize,
        what: &'static str,
        found: f64,
        most: f64,
    ) -> Result<(), ScheduleError> {
        if found.is_finite() && (0.0..=most).contains(&found) {
            return Ok(());
        }
        Err(ScheduleError::Range {
            index,
            phase: self.name(),
            what,
            expected: if most == 1.0 {
                "a number from 0 to 1"
            } else {
                "a finite number of at least 0"
            },
            found,
        })
    }
}

/// How much of a phase is over; all of it if it takes no steps.
fn share(t: u64, steps: u64) -> f64 {
    match steps {
        0 => 1.0,
        steps => t as f64 / steps as f64,
    }
}
