//! Errors of settings.

use fusestep_planner::LEAST_INT8_ELEMENTS;
use fusestep_tensor::{Quoted, advised, counted, grouped};
use thiserror::Error;

use super::Need;

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
    #[error("{first} and {second}: {}", advised(why))]
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
    /// A type of state where no rule keeps any.
    #[error(
        "state_dtype: expected a rule that keeps state, found {rule}, which keeps none; leave it \
         out"
    )]
    NoState {
        /// The rule.
        rule: &'static str,
    },
    /// A cap that cuts gradients into more buckets than a plan can have.
    #[error(
        "bucket_cap_mib: expected at most {} of this model's gradients, found some {}; give \
         {least} or more",
        counted(*most, "bucket"),
        grouped(*found)
    )]
    Buckets {
        /// Most buckets of a plan.
        most: u64,
        /// Buckets that the cap asks for.
        found: u64,
        /// The smallest cap that works.
        least: f64,
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
    #[error("{name}: expected {needs}{works} too, found {found}; it has no effect otherwise")]
    Needs {
        /// The setting.
        name: &'static str,
        /// The setting that is missing.
        needs: &'static str,
        /// Its values that work, behind a space; empty where any does.
        works: String,
        /// Its value.
        found: String,
    },
    /// Names of parameters whose state would stay in f32 in any case.
    #[error(
        "keep_f32: expected a part of the name of a parameter whose state is in int8, found \
         `{found}`, which is in names of smaller ones alone: `{param}` has {}, and state below {} \
         stays in f32 anyway; leave it out",
        counted(*numel, "element"),
        grouped(LEAST_INT8_ELEMENTS),
        found = Quoted(found),
        param = Quoted(param)
    )]
    KeptAnyway {
        /// Part of the parameters' names.
        found: String,
        /// The largest of them.
        param: String,
        /// Its number of elements.
        numel: u64,
    },
}

impl OptionError {
    /// The setting that is refused, or the first of two, with which the error begins.
    pub fn setting(&self) -> &'static str {
        match self {
            Self::Range { name, .. }
            | Self::Unmatched { name, .. }
            | Self::NeedsRanks { name, .. }
            | Self::Needs { name, .. } => name,
            Self::Conflict { first, .. } => first,
            Self::NoTrust { .. } => "trust_of",
            Self::NoState { .. } => "state_dtype",
            Self::Buckets { .. } => "bucket_cap_mib",
            Self::KeptAnyway { .. } => "keep_f32",
        }
    }

    /// The error of a setting without the one that it needs, which has another value.
    pub(super) fn needs(name: &'static str, need: Need, found: String) -> Self {
        let space = if need.works.is_empty() { "" } else { " " };
        let works = format!("{space}{}", need.works);
        Self::Needs { name, needs: need.with, works, found }
    }
}

/// Names, each quoted, as a choice.
fn one_of(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", Quoted(name))).collect();
    quoted.join(" or ")
}
