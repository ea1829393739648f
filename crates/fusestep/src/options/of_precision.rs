//! Rows of the precision of parameters and state.

use fusestep_launch::{Precision, Rounding};

use super::OptionError;
use super::conflicts::ROUNDED;
use super::row::{About, ListField, Need, Rows, Section};
use super::text::{RoundingKind, parse_name};

const RANDOM: Need = Need::at("rounding", "stochastic");

/// Visits the settings of a precision, and the names whose state stays in f32.
pub(super) fn of_precision(
    rows: &mut Rows<'_>,
    precision: &mut Precision,
    keep_f32: &mut Vec<String>,
) -> Result<(), OptionError> {
    rows.section = Section::Precision;
    // Gradients have a setting of their own, `reduce_dtype`.
    let Precision { master, state, rounding, grad: _ } = precision;
    rows.choice(
        "master_weights",
        master,
        "Copy or bits that f16 and bf16 parameters have beside them.",
    )?;
    rows.choice("state_dtype", state, "Element type of optimizer state.")?;
    let about = About::from("Part of the names of parameters whose state stays in f32, not int8.");
    rows.list(
        ListField { name: "keep_f32", field: keep_f32, expected: "a part of a parameter's name" },
        parse_name,
        String::clone,
        about.needs(Need::at("state_dtype", "int8")),
    )?;
    let (mut kind, mut seed) = match *rounding {
        Rounding::Nearest => (RoundingKind::Nearest, 0),
        Rounding::Stochastic { seed } => (RoundingKind::Stochastic, seed),
    };
    let about =
        About::from("How bf16 state, and bf16 parameters without master weights, are rounded.");
    rows.choice("rounding", &mut kind, about.conflicts(ROUNDED))?;
    let about = About::from("Start of the random numbers of stochastic rounding.");
    rows.count("rounding_seed", &mut seed, 0..=u64::MAX, about.needs(RANDOM))?;
    *rounding = match kind {
        RoundingKind::Nearest if seed == 0 => Rounding::Nearest,
        // A seed alone is kept for the check of what has no effect.
        RoundingKind::Nearest => {
            let found = "nearest".to_owned();
            return Err(OptionError::needs("rounding_seed", RANDOM, found));
        }
        RoundingKind::Stochastic => Rounding::Stochastic { seed },
    };
    Ok(())
}
