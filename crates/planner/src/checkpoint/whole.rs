//! Tensors put together from the ranges of all files.

use std::collections::HashMap;
use std::path::Path;

use super::manifest::refuse;
use super::non_finite::NonFinite;
use super::shards::WholeTensors;
use crate::Result;

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
) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_covered_once_each_in_any_order_or_the_ranges_are_refused() {
        let check = |numel, ranges: &[(u64, u64)]| {
            let checked = check_covered(Path::new("shard"), "w", numel, ranges.to_vec());
            checked.map_err(|error| error.to_string())
        };
        for whole in [&[(0, 10)][..], &[(4, 10), (0, 4)], &[(0, 0), (0, 10)]] {
            assert_eq!(check(10, whole), Ok(()));
        }
        assert_eq!(check(0, &[]), Ok(()));
        for (ranges, found) in [
            (&[(0, 5), (4, 10)][..], "element 4 again"),
            (&[(0, 10), (0, 10)], "element 0 again"),
            (&[(0, 4), (5, 10)], "element 5 next"),
            (&[(1, 10)], "element 1 next"),
            (&[(0, 9)], "found 9"),
            (&[], "found 0"),
        ] {
            let error = check(10, ranges).unwrap_err();
            assert!(error.contains(found), "{ranges:?}: {error}");
        }
    }
}
