//! Tensors put together from the ranges of all files.

use std::collections::HashMap;
use std::path::Path;

use super::manifest::refuse;
use super::non_finite::NonFinite;
use super::shards::WholeTensors;
use crate::PlanError;

/// Tensors being put together.
#[derive(Default)]
pub(super) struct Whole {
    pub(super) tensors: WholeTensors,
    /// Elements that have been found of each, in any order.
    pub(super) ranges: HashMap<String, Vec<(u64, u64)>>,
    pub(super) non_finite: NonFinite,
}

/// Refuses ranges that leave elements out, or have some twice.
pub(super) fn check_covered(
    path: &Path,
    name: &str,
    numel: u64,
    mut ranges: Vec<(u64, u64)>,
) -> Result<(), PlanError> {
    ranges.retain(|(first, end)| first < end);
    ranges.sort_unstable();
    let mut covered = 0;
    for (first, end) in ranges {
        if first != covered {
            let what = if first < covered { "again" } else { "next" };
            let expected = format!("each of {numel} elements once, {covered} after {covered}");
            let found = format!("element {first} {what}");
            return Err(refuse(path, name, &expected, found));
        }
        covered = end;
    }
    if covered == numel {
        return Ok(());
    }
    let expected = format!("{numel} elements in all shards");
    Err(refuse(path, name, &expected, covered.to_string()))
}
