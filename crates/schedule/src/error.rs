//! Errors of schedules.

use alloc::string::String;
use core::fmt;

use crate::MOST_PHASES;

/// Error of a schedule.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A number of a phase is out of range.
    Range {
        /// Position of the phase, from 0.
        index: usize,
        /// Name of the phase.
        phase: &'static str,
        /// Name of the number.
        what: &'static str,
        /// Values that would work.
        expected: &'static str,
        /// The value given.
        found: f64,
    },
    /// A phase without an end has another behind it.
    Endless {
        /// Position of the phase, from 0.
        index: usize,
        /// Name of the phase.
        phase: &'static str,
    },
    /// More phases than [`MOST_PHASES`](crate::MOST_PHASES).
    Phases {
        /// The number of phases.
        found: usize,
    },
    /// A text is no schedule.
    Text {
        /// Position of the phase, from 0.
        index: usize,
        /// A text that would work.
        expected: &'static str,
        /// The phase as it was written, or its beginning.
        found: String,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleError::Range { index, phase, what, expected, found } => write!(
                f,
                "schedule, phase {}: {what} of {phase}: expected {expected}, found {found}",
                index + 1
            ),
            ScheduleError::Endless { index, phase } => write!(
                f,
                "schedule, phase {}: expected a number of steps for {phase}, since a phase \
                 follows, found none",
                index + 1
            ),
            ScheduleError::Phases { found } => write!(
                f,
                "schedule: expected at most {MOST_PHASES} phases, found {found}; `step` changes \
                 the rate as often as it likes"
            ),
            ScheduleError::Text { index, expected, found } => write!(
                f,
                "schedule, phase {}: expected {expected}, found `{}`",
                index + 1,
                // Characters on which a terminal would act are shown escaped.
                found.escape_debug()
            ),
        }
    }
}

impl core::error::Error for ScheduleError {}
