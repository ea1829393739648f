//! Errors of calls between ranks.

use std::borrow::Cow;

use fusestep_tensor::{DType, counted};
use serde::{Deserialize, Deserializer, Serialize};

use crate::{Field, Operation, ReduceOp};

/// The name of an operation. With the type written out, serde would take the name for a part of the
/// data that it reads.
type Name = &'static str;

/// Error of a call between ranks. A failed call closes the group, and every rank gets the same
/// value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CollectiveError {
    /// Ranks did not come to a call before the deadline.
    #[error("{operation} {sequence}{}: expected all ranks within {timeout_ms} ms, found none of {ranks:?}; \
        see what these ranks did last, or raise the timeout if they are only slow", bucket_text(.bucket))]
    Late {
        /// The late ranks.
        ranks: Vec<usize>,
        /// The call of the rank whose deadline passed first.
        #[serde(deserialize_with = "name")]
        operation: Name,
        /// The call's number within the group, from 1.
        sequence: u64,
        /// The bucket that the call was for.
        bucket: Option<u32>,
        /// How long the rank waited.
        timeout_ms: u64,
    },
    /// Ranks did not do the same thing; no data has moved.
    #[error("call {sequence}, {field}: expected `{expected}` as on rank {expected_rank}, found `{found}` on rank {found_rank}; \
        all ranks must make the same calls in the same order (here {}{})",
        here_text(.expected_operation, .found_operation), bucket_text(.bucket))]
    Mismatch {
        /// The first field that differs.
        field: Field,
        /// The call's number on `expected_rank`.
        sequence: u64,
        /// The bucket on `expected_rank`.
        bucket: Option<u32>,
        /// The lowest rank of the majority.
        expected_rank: usize,
        /// The value on `expected_rank`.
        expected: String,
        /// The operation on `expected_rank`.
        #[serde(deserialize_with = "name")]
        expected_operation: Name,
        /// The lowest rank that differs.
        found_rank: usize,
        /// The value on `found_rank`.
        found: String,
        /// The operation on `found_rank`.
        #[serde(deserialize_with = "name")]
        found_operation: Name,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked after {}", counted(*.calls, "call"))]
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// Calls that the rank had begun.
        calls: u64,
    },
    /// A rank gave its communicator up while others still used theirs.
    #[error(
        "rank {rank} left the group after {}; all ranks must make the same calls",
        counted(*.calls, "call")
    )]
    Left {
        /// The rank that left.
        rank: usize,
        /// Calls that the rank had begun.
        calls: u64,
    },
    /// A rank's process is gone.
    #[error(
        "rank {rank} died after {}: its process is gone; see what it printed, and \
         whether the system ended it for memory",
        counted(*.calls, "call")
    )]
    Died {
        /// The rank whose process is gone.
        rank: usize,
        /// Calls that the rank had begun.
        calls: u64,
    },
    /// Somebody broke the group off.
    #[error("aborted by rank {rank}: {reason}")]
    Aborted {
        /// The rank whose aborter was used.
        rank: usize,
        /// The reason given.
        reason: String,
    },
    /// The result of a pending call was thrown away.
    #[error(
        "rank {rank} dropped a pending {operation} without waiting for it; call `wait` on every \
         pending result"
    )]
    Dropped {
        /// The rank that dropped the result.
        rank: usize,
        /// The operation that was pending.
        #[serde(deserialize_with = "name")]
        operation: Name,
    },
    /// A call that cannot be made, whatever the other ranks do.
    #[error("{operation} on rank {rank}: {reason}")]
    Refused {
        /// The rank that made the call.
        rank: usize,
        /// The operation of the call.
        #[serde(deserialize_with = "name")]
        operation: Name,
        /// The expectation, what was found, and what would work.
        reason: String,
    },
    /// The engine that carries the data, for example MPI, reports an error of its own.
    #[error("{operation} on rank {rank}: expected the engine to do it, found {reason}")]
    Engine {
        /// The rank that made the call.
        rank: usize,
        /// The operation of the call.
        #[serde(deserialize_with = "name")]
        operation: Name,
        /// The engine's own words.
        reason: String,
    },
    /// A reduction is not defined for a dtype.
    #[error(
        "{operation} on rank {rank}: {reduce} is not defined for {dtype}; use sum and divide, or \
         a floating-point dtype"
    )]
    Undefined {
        /// The rank that made the call.
        rank: usize,
        /// The operation of the call.
        #[serde(deserialize_with = "name")]
        operation: Name,
        /// The reduction.
        reduce: ReduceOp,
        /// The dtype.
        dtype: DType,
    },
}

impl CollectiveError {
    /// The error for a call of `rank` that cannot be made, for this reason.
    pub fn refused(rank: usize, operation: &'static str, reason: impl ToString) -> Self {
        Self::Refused { rank, operation, reason: reason.to_string() }
    }

    /// The error for a call of `rank` of which the engine gave this reason.
    pub fn engine(rank: usize, operation: &'static str, reason: impl ToString) -> Self {
        Self::Engine { rank, operation, reason: reason.to_string() }
    }

    /// The error with the parties of a rendezvous named as ranks: party `i` is rank `ranks[i]`.
    /// Only mismatches between parties of the list change.
    pub fn with_ranks(mut self, ranks: &[usize]) -> Self {
        if let Self::Mismatch { expected_rank, found_rank, .. } = &mut self
            && let (Some(&expected), Some(&found)) =
                (ranks.get(*expected_rank), ranks.get(*found_rank))
        {
            (*expected_rank, *found_rank) = (expected, found);
        }
        self
    }

    /// The error with its ranks in another numbering: rank `i` becomes `ranks[i]`. Ranks beyond the
    /// list and the words of a reason stay.
    pub fn in_world(mut self, ranks: &[usize]) -> Self {
        let rename = |rank: &mut usize| *rank = ranks.get(*rank).copied().unwrap_or(*rank);
        match &mut self {
            Self::Late { ranks: late, .. } => {
                late.iter_mut().for_each(rename);
                late.sort_unstable();
            }
            Self::Mismatch { expected_rank, found_rank, .. } => {
                rename(expected_rank);
                rename(found_rank);
            }
            Self::Panicked { rank, .. }
            | Self::Left { rank, .. }
            | Self::Died { rank, .. }
            | Self::Aborted { rank, .. }
            | Self::Dropped { rank, .. }
            | Self::Refused { rank, .. }
            | Self::Engine { rank, .. }
            | Self::Undefined { rank, .. } => rename(rank),
        }
        self
    }
}

/// The name of an operation, as the constant of this program.
fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    let found = Cow::<str>::deserialize(from)?;
    let known = Operation::NAMES.into_iter().find(|name| *name == found);
    // The name is the caller's own for a call; a group ends once, so this happens once in its life.
    Ok(known.unwrap_or_else(|| Box::leak(short(&found).into_boxed_str())))
}

/// Longest text of an error in bytes, so that the whole fits a short message.
const TEXT_BYTES: usize = 1024;

/// The part of a text that fits.
pub(crate) fn short(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_BYTES)).rev().find(|&end| text.is_char_boundary(end));
    text[..end.unwrap_or(0)].to_owned()
}

fn here_text(expected: &str, found: &str) -> String {
    if expected == found { format!("all {found}") } else { format!("{expected} and {found}") }
}

fn bucket_text(bucket: &Option<u32>) -> String {
    bucket.map_or_else(String::new, |bucket| format!(", bucket {bucket}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operation_that_all_ranks_called_is_named_once() {
        let told = |found_operation: &'static str| {
            let error = CollectiveError::Mismatch {
                field: Field::Numel,
                sequence: 3,
                bucket: Some(1),
                expected_rank: 0,
                expected: "8".to_owned(),
                expected_operation: "send",
                found_rank: 1,
                found: "4".to_owned(),
                found_operation,
            };
            error.to_string()
        };
        assert!(told("send").ends_with("(here all send, bucket 1)"));
        assert!(told("barrier").ends_with("(here send and barrier, bucket 1)"));
    }

    /// One error of every kind that carries a rank, all of this one.
    fn of_every_kind(rank: usize) -> Vec<CollectiveError> {
        let (calls, operation, reason) = (3, "barrier", String::from("why"));
        vec![
            CollectiveError::Panicked { rank, calls },
            CollectiveError::Left { rank, calls },
            CollectiveError::Died { rank, calls },
            CollectiveError::Aborted { rank, reason: reason.clone() },
            CollectiveError::Dropped { rank, operation },
            CollectiveError::Refused { rank, operation, reason: reason.clone() },
            CollectiveError::Engine { rank, operation, reason },
            CollectiveError::Undefined {
                rank,
                operation,
                reduce: ReduceOp::Average,
                dtype: DType::I32,
            },
            CollectiveError::Late {
                ranks: vec![rank],
                operation,
                sequence: 1,
                bucket: None,
                timeout_ms: 5,
            },
            CollectiveError::Mismatch {
                field: Field::Operation,
                sequence: 1,
                bucket: None,
                expected_rank: rank,
                expected: "a".to_owned(),
                expected_operation: operation,
                found_rank: rank,
                found: "b".to_owned(),
                found_operation: operation,
            },
        ]
    }

    #[test]
    fn every_rank_of_every_error_is_said_in_the_other_numbering_and_unknown_ones_stay() {
        let group = [4, 9];
        for (own, expected) in [(0, 4), (1, 9), (2, 2)] {
            let found = of_every_kind(own).into_iter();
            let found: Vec<_> = found.map(|error| error.in_world(&group)).collect();
            assert_eq!(found, of_every_kind(expected));
        }
    }
}
