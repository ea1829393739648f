#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod error;
mod phase;
mod text;

use alloc::vec;
use alloc::vec::Vec;

pub use error::ScheduleError;
pub use phase::Phase;

/// Most phases of a schedule, so that the factor of a step costs little whatever a file says.
pub const MOST_PHASES: usize = 128;

/// Largest factor of a phase on the learning rate, so that no rate of a run overflows.
pub const MOST_FACTOR: f64 = 1e6;

/// The factor on the learning rate at every step: one phase after the other.
///
/// Schedules are values: equal schedules have equal factors, and a step's factor follows from its
/// number.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The phases, at least one.
    phases: Vec<Phase>,
}

impl Schedule {
    /// Factor 1 at every step.
    pub fn constant() -> Self {
        Phase::Constant { steps: None, factor: 1.0 }.into()
    }

    /// A linear rise over `steps` steps, to (t + 1) / (steps + 1) at step t. No step is lost at
    /// rate 0, and the first step afterwards has the whole rate.
    pub fn warmup(steps: u64) -> Self {
        Phase::warmup(steps).into()
    }

    /// Half a cosine from 1 to 0 over `steps` steps.
    pub fn cosine(steps: u64) -> Self {
        Phase::Cosine { steps, floor: 0.0 }.into()
    }

    /// This schedule, followed by another one, which begins at its own step 0.
    pub fn then(mut self, next: impl Into<Schedule>) -> Self {
        self.phases.extend(next.into().phases);
        self
    }

    /// The phases, in order.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// Checks every number.
    ///
    /// # Errors
    /// A [`ScheduleError`] that names the phase, the number and what would work. Powers are finite
    /// and not negative, and floors are from 0 to 1. No factor of any step is below 0 or above
    /// [`MOST_FACTOR`]. There are at most [`MOST_PHASES`] phases, and only the last one may have no
    /// end.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        let found = self.phases.len();
        if found > MOST_PHASES {
            return Err(ScheduleError::Phases { found });
        }
        for (index, phase) in self.phases.iter().enumerate() {
            phase.validate(index)?;
            let last = index + 1 == self.phases.len();
            if phase.steps().is_none() && !last {
                return Err(ScheduleError::Endless { index, phase: phase.name() });
            }
        }
        Ok(())
    }

    /// The factor of the update that `step` updates went before.
    ///
    /// # Cost
    /// Linear in the number of phases.
    pub fn factor(&self, step: u64) -> f64 {
        let mut step = step;
        let (last, before) = match self.phases.split_last() {
            Some(split) => split,
            None => return 1.0,
        };
        for phase in before {
            match phase.steps() {
                Some(steps) if step >= steps => step -= steps,
                _ => return phase.factor(step),
            }
        }
        last.factor(step)
    }

    /// The step from which on the factor never changes; `None` if there is none.
    pub fn settled_from(&self) -> Option<u64> {
        let steps = |phase: &Phase| match phase {
            Phase::Constant { steps: None, .. } => Some(0),
            other => other.steps(),
        };
        self.phases.iter().try_fold(0u64, |sum, phase| Some(sum.saturating_add(steps(phase)?)))
    }
}

impl From<Phase> for Schedule {
    fn from(phase: Phase) -> Self {
        Self { phases: vec![phase] }
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self::constant()
    }
}
