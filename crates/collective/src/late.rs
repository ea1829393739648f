//! Ranks that do not come: who they are, and the error that names them.

use std::time::Duration;

use crate::{CollectiveError, Fingerprint};

impl Fingerprint {
    /// The error of this call if `ranks` have not come within `timeout`.
    pub fn late(&self, ranks: Vec<usize>, timeout: Duration) -> CollectiveError {
        CollectiveError::Late {
            ranks,
            operation: self.operation.name(),
            sequence: self.sequence,
            bucket: self.context.bucket,
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// The ranks that cause a delay for which `rank` blames the ranks `late`. `waits_for` names the
/// rank that a rank waits for in a transfer. A rank that only waits is not late, the other side is.
/// Ranks that wait for each other in a circle with `rank` are named as `late` has them.
pub fn behind(
    rank: usize,
    world_size: usize,
    late: &[usize],
    waits_for: impl Fn(usize) -> Option<usize>,
) -> Vec<usize> {
    let follow = |first: usize| {
        let mut last = first;
        for _ in 0..world_size {
            match waits_for(last) {
                None => return last,
                Some(peer) if peer == rank => return first,
                Some(peer) => last = peer,
            }
        }
        first
    };
    let mut behind: Vec<usize> = late.iter().map(|&first| follow(first)).collect();
    behind.sort_unstable();
    behind.dedup();
    behind
}
