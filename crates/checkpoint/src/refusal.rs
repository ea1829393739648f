//! Refusals of checkpoints and state files.

use std::fmt::Display;
use std::path::Path;

use fusestep_planner::PlanError;

/// Advice where the run's own setting is another than the saved one.
pub(crate) const OR_ELSEWHERE: &str = "; go on with that, or begin in another folder";

/// Error of a part of a checkpoint or state file, with both sides.
pub(crate) fn refuse(
    path: &Path,
    what: &str,
    expected: impl Display,
    found: impl Display,
) -> PlanError {
    refusal(path, what, [&expected, &found])
}

// Not compiled for every pair of types.
fn refusal(path: &Path, what: &str, [expected, found]: [&dyn Display; 2]) -> PlanError {
    PlanError::Checkpoint {
        path: path.display().to_string(),
        what: what.to_owned(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
}
