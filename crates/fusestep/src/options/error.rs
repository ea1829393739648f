//! Errors of settings.

use fusestep_tensor::Quoted;
use thiserror::Error;

/// A setting that cannot be had; names are those of [`crate::StepOptions::each`].
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum OptionError {
    /// A value out of range.
    #[error("{name}: expected {expected}, found `{found}`")]
    Range {
        /// The setting.
        name: &'static str,
        /// Values that it can have.
        expected: String,
        /// The value given.
        found: String,
    },
    /// Two settings that contradict each other.
    #[error("{first} and {second}: {why}; remove one")]
    Conflict {
        /// The setting whose row names the conflict.
        first: &'static str,
        /// The other setting.
        second: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A part of a name that no parameter has.
    #[error(
        "{name}: expected a part of a parameter's name such as {}, found `{found}`, which is in none \
         of {count}; leave it out",
        one_of(such_as),
        found = Quoted(found)
    )]
    Unmatched {
        /// The setting.
        name: &'static str,
        /// Some parameters' names.
        such_as: Vec<String>,
        /// The text.
        found: String,
        /// The number of parameters.
        count: usize,
    },
    /// Trust ratios of parameters whose rules have none.
    #[error(
        "trust_of of `{found}`: expected parameters of a rule that scales by trust ratios (lars, \
         lamb), found {rule}, which has none; leave it out",
        found = Quoted(found)
    )]
    NoTrust {
        /// Part of the parameters' names.
        found: String,
        /// Rule of the first of them.
        rule: &'static str,
    },
    /// A setting of many ranks where one trains alone.
    #[error(
        "{name} of {found}: expected an optimizer on ranks, found one that has joined none; build \
         it with `.on(comm)`, `Solo` for one process, or leave {name} out"
    )]
    NeedsRanks {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: String,
    },
    /// A setting that has no effect without another.
    #[error("{name}: expected {needs} too, without which it has no effect")]
    Needs {
        /// The setting.
        name: &'static str,
        /// The setting that is missing.
        needs: &'static str,
    },
}

/// Names, each quoted, as a choice.
fn one_of(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", Quoted(name))).collect();
    quoted.join(" or ")
}
