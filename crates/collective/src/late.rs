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

/// The ranks of `world_size` behind a delay that `rank` has seen as `late`, where `waits_for` says
/// whom a rank waits for in a transfer: whoever only waits is not late, the other side is. Ranks
/// that wait for each other in a circle, this one among them, are named as they were seen.
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
