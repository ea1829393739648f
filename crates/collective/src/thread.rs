//! Ranks as threads of one process, on shared memory.

mod algorithms;
mod calls;
mod engine;
mod group;
mod options;
mod reduction;
mod transfer;

use std::sync::Arc;

use crate::launcher::require_alone;
use crate::{CallOptions, Communicator, Ranked};
use group::Group;

pub use engine::Threads;
pub use options::Options;

/// One rank of a group of threads; see [`thread_ranks`].
///
/// # Cost
/// Each rank reduces its part of every buffer where it lies; nothing is copied through mailboxes
/// and nothing is allocated, except by an all-to-all in place and by calls of more than 16 ranks.
/// Two waits for all ranks per call.
pub type ThreadCommunicator = Ranked<Threads>;

/// The ranks of a new group of `world_size` threads, in rank order; each goes to a thread of its
/// own.
pub fn thread_ranks(world_size: usize, options: &Options) -> Vec<ThreadCommunicator> {
    let (group, participants) = Group::new(world_size, options.clone());
    let participants = participants.into_iter().enumerate();
    let threads =
        participants.map(|(rank, participant)| Threads::new(Arc::clone(&group), rank, participant));
    threads.map(|engine| Ranked::on(engine, CallOptions::from(options))).collect()
}

/// Runs `body` on one thread for each of `world_size` ranks and returns what each returned or
/// panicked with, in rank order.
///
/// # Errors
/// An error of [`InvalidInput`](std::io::ErrorKind::InvalidInput) for no ranks, which would run
/// nothing. The same in a process of a launcher that has joined none of the other processes: each
/// process would run all ranks. The operating system's error if a thread cannot be started; ranks
/// that were started get an error from their communicators.
pub fn run_ranks<R: Send>(
    world_size: usize,
    options: &Options,
    body: impl Fn(ThreadCommunicator) -> R + Sync,
) -> std::io::Result<Vec<std::thread::Result<R>>> {
    if world_size == 0 {
        let found = "ranks: expected 1 or more, found 0, of which none would run";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, found));
    }
    let alone = require_alone();
    alone.map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
    let mut ranks = thread_ranks(world_size, options).into_iter();
    let body = &body;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for comm in ranks.by_ref() {
            let builder = std::thread::Builder::new().name(format!("rank-{}", comm.rank()));
            threads.push(builder.spawn_scoped(scope, move || body(comm))?);
        }
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fusestep_tensor::DType;

    use super::*;
    use crate::{Buffers, Call, CollectiveError, Operation};

    /// Between a rank's deadline and the end of its call, which closes the group, another rank's
    /// deadline may come: it still names the rank that nobody has heard of.
    #[test]
    fn a_rank_whose_transfer_was_too_late_is_still_seen_to_have_waited() {
        let options = Options { timeout: Duration::from_millis(5), ..Options::default() };
        let mut ranks = thread_ranks(3, &options);
        let [silent, waiting, last] = [0, 1, 2];
        let mut buffer = [0];
        let call = Call {
            operation: Operation::Receive { from: silent },
            dtype: DType::U8,
            counts: None,
            buffers: Buffers::InPlace(&mut buffer),
        };
        let blocks = call.blocks(waiting, 3).unwrap();
        let outcome = ranks[waiting].make(call, blocks);
        assert!(
            matches!(&outcome, Err(CollectiveError::Late { ranks, .. }) if *ranks == [silent]),
            "{outcome:?}"
        );
        assert_eq!(ranks[last].engine().group.behind(last, &[waiting]), [silent]);
    }
}
