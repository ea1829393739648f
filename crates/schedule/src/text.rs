//! Schedules as text: `warmup:100,cosine:900:0.1`.

use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU64;
use core::str::FromStr;

use crate::{MOST_PHASES, Phase, Schedule, ScheduleError};

/// Writes the form that [`Schedule::from_str`] reads.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, phase) in self.phases.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            write!(f, "{phase}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Phase::Linear { steps, .. } if *self == Phase::warmup(*steps) => {
                write!(f, "warmup:{steps}")
            }
            Phase::Constant { steps, factor } => {
                f.write_str("constant")?;
                match steps {
                    None if *factor == 1.0 => {}
                    None => f.write_str(":")?,
                    Some(steps) => write!(f, ":{steps}")?,
                }
                optional(f, (*factor != 1.0).then_some(factor))
            }
            Phase::Linear { steps, from, to } => write!(f, "linear:{steps}:{from}:{to}"),
            Phase::Cosine { steps, floor } => {
                write!(f, "cosine:{steps}")?;
                optional(f, (*floor != 0.0).then_some(floor))
            }
            Phase::Polynomial { steps, power, floor } => {
                write!(f, "polynomial:{steps}:{power}")?;
                optional(f, (*floor != 0.0).then_some(floor))
            }
            Phase::Step { every, gamma, steps } => {
                write!(f, "step:{every}:{gamma}")?;
                optional(f, steps.as_ref())
            }
        }
    }
}

fn optional<T: fmt::Display>(f: &mut fmt::Formatter<'_>, value: Option<&T>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, ":{value}"))
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    /// Reads phases joined by commas. A phase is its name and its numbers, joined by colons; the
    /// table on the [crate's page](crate) lists all of them.
    ///
    /// # Errors
    /// [`ScheduleError::Text`] with the form of the phase; those of [`Schedule::validate`].
    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let found = text.split(',').count();
        if found > MOST_PHASES {
            return Err(ScheduleError::Phases { found });
        }
        let phases = text.split(',').enumerate();
        let phases = phases.map(|(index, text)| phase(index, text.trim()));
        let schedule = Schedule { phases: phases.collect::<Result<_, _>>()? };
        schedule.validate()?;
        Ok(schedule)
    }
}

/// Most characters of a phase that an error quotes.
const MOST_QUOTED: usize = 200;

/// Most numbers of a phase.
const MOST_NUMBERS: usize = 3;

/// Reader of one kind of phase: makes the phase of its numbers, or `None` if they do not have its
/// form.
type Reader = fn(&[&str]) -> Option<Phase>;

fn phase(index: usize, text: &str) -> Result<Phase, ScheduleError> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let numbers: Vec<&str> = parts.collect();
    let refuse = |expected| ScheduleError::Text {
        index,
        expected,
        found: text.chars().take(MOST_QUOTED).collect(),
    };
    let Some((expected, read)) = reader(name) else {
        return Err(refuse("constant, warmup, linear, cosine, polynomial or step"));
    };
    let read = (numbers.len() <= MOST_NUMBERS).then(|| read(&numbers));
    read.flatten().ok_or_else(|| refuse(expected))
}

/// The form and the reader of a kind of phase; `None` for a name that no kind has.
fn reader(name: &str) -> Option<(&'static str, Reader)> {
    Some(match name {
        "constant" => ("constant[:STEPS[:FACTOR]]", constant),
        "warmup" => ("warmup:STEPS", |n| match n {
            [steps] => Some(Phase::warmup(number(steps)?)),
            _ => None,
        }),
        "linear" => ("linear:STEPS:FROM:TO", |n| match n {
            [steps, from, to] => {
                Some(Phase::Linear { steps: number(steps)?, from: number(from)?, to: number(to)? })
            }
            _ => None,
        }),
        "cosine" => ("cosine:STEPS[:FLOOR]", |n| match n {
            [steps, rest @ ..] => {
                Some(Phase::Cosine { steps: number(steps)?, floor: one_or(rest, 0.0)? })
            }
            _ => None,
        }),
        "polynomial" => ("polynomial:STEPS:POWER[:FLOOR]", |n| match n {
            [steps, power, rest @ ..] => Some(Phase::Polynomial {
                steps: number(steps)?,
                power: number(power)?,
                floor: one_or(rest, 0.0)?,
            }),
            _ => None,
        }),
        "step" => ("step:EVERY:GAMMA[:STEPS], EVERY above 0", |n| match n {
            [every, gamma, rest @ ..] => Some(Phase::Step {
                every: number::<NonZeroU64>(every)?,
                gamma: number(gamma)?,
                steps: steps_of(rest)?,
            }),
            _ => None,
        }),
        _ => return None,
    })
}

fn constant(numbers: &[&str]) -> Option<Phase> {
    let (steps, rest) = match numbers {
        [] => (None, numbers),
        // The number of steps may be empty if a factor follows.
        ["", rest @ ..] if !rest.is_empty() => (None, rest),
        [steps, rest @ ..] => (Some(number(steps)?), rest),
    };
    Some(Phase::Constant { steps, factor: one_or(rest, 1.0)? })
}

fn number<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

/// Reads a number that may be left out, and allows nothing behind it.
fn one_or<T: FromStr>(rest: &[&str], default: T) -> Option<T> {
    match rest {
        [] => Some(default),
        [text] => number(text),
        _ => None,
    }
}

fn steps_of(rest: &[&str]) -> Option<Option<u64>> {
    match rest {
        [] => Some(None),
        [text] => Some(Some(number(text)?)),
        _ => None,
    }
}
