//! Outcomes of many ranks, told as one: the first cause first, then every other rank's own error.

use anyhow::{Error, anyhow};
use fusestep_collective::CollectiveError;
use fusestep_planner::PlanError;

use crate::words::in_words;

/// The result of rank 0, unless a rank has failed.
///
/// # Panics
/// With a rank's own panic, which has been printed.
pub(crate) fn first<T>(
    outcomes: Vec<std::thread::Result<Result<T, Error>>>,
) -> anyhow::Result<Option<T>> {
    let (mut found, mut errors) = (None, Vec::new());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            Ok(result) if rank == 0 => found = Some(result),
            Ok(_) => {}
            Err(error) => errors.push((rank, error)),
        }
    }
    // Ranks that were only left alone say less than a rank that failed by itself.
    errors.sort_by_key(|(_, error)| is_consequence(error));
    let mut errors = errors.into_iter();
    let Some((rank, cause)) = errors.next() else {
        return Ok(found);
    };
    let said = format!("{cause:#}");
    let mut others = String::new();
    for (rank, error) in errors {
        // Equal errors of all ranks, or another rank's error that was passed on, are told once.
        if !format!("{error:#}").contains(&said) {
            others += &format!("\nrank {rank}: {}", in_words(&error));
        }
    }
    // Texts alone cross over from here, so settings get their flags now.
    let cause = in_words(&cause);
    if others.is_empty() {
        return Err(anyhow!(cause));
    }
    Err(anyhow!("rank {rank}: {cause}{others}"))
}

/// Whether a rank failed because another one had.
fn is_consequence(error: &Error) -> bool {
    error.chain().any(|cause| {
        let plan = cause.downcast_ref::<PlanError>();
        let collective = match plan {
            Some(PlanError::Collective(error)) => Some(error),
            _ => cause.downcast_ref::<CollectiveError>(),
        };
        let left_alone = matches!(
            collective,
            Some(
                CollectiveError::Left { .. }
                    | CollectiveError::Died { .. }
                    | CollectiveError::Panicked { .. }
                    | CollectiveError::Aborted { .. }
                    | CollectiveError::Dropped { .. }
                    | CollectiveError::Late { .. }
            )
        );
        let told = matches!(plan, Some(PlanError::OtherRank { .. }));
        left_alone || told || is_founding_of_others(cause)
    })
}

/// Whether a rank's GPU is not used because another rank's cannot be.
#[cfg(feature = "nccl")]
fn is_founding_of_others(cause: &(dyn std::error::Error + 'static)) -> bool {
    use fusestep_collective_nccl::NcclError;

    matches!(cause.downcast_ref(), Some(NcclError::Peer { .. }))
}

#[cfg(not(feature = "nccl"))]
fn is_founding_of_others(_: &(dyn std::error::Error + 'static)) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> Error {
        CollectiveError::Left { rank: 1, calls: 3 }.into()
    }

    #[test]
    fn the_first_cause_comes_first_and_no_ranks_own_error_is_lost() {
        let outcomes =
            vec![Ok(Err(left())), Ok(Err(anyhow!("disk full"))), Ok(Err(anyhow!("no file")))];
        let error = first::<()>(outcomes).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[..2], ["rank 1: disk full", "rank 2: no file"]);
        assert!(lines[2].starts_with("rank 0: rank 1 left"), "{error}");
    }

    #[test]
    fn what_all_ranks_say_is_said_once() {
        let told = PlanError::OtherRank { rank: 1, reason: "disk full".to_owned() };
        let outcomes = vec![Ok(Err(told.into())), Ok(Err(anyhow!("disk full")))];
        assert_eq!(first::<()>(outcomes).unwrap_err().to_string(), "disk full");
        assert_eq!(first(vec![Ok(Ok(5)), Ok(Ok(6))]).unwrap(), Some(5));
    }
}
