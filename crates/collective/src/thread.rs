//! Ranks as threads of one process, on shared memory.

mod algorithms;
mod group;
mod reduction;
mod transfer;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fusestep_simd::Level;
use fusestep_simd::Participant;

use crate::{
    Aborter, Call, CallContext, CollectiveError, Communicator, Fingerprint, FlightRecorder,
    Membership, RankMemory, ReduceUpdate,
};
use group::{Group, Header, Placement};

/// Longest timeout; a longer one is cut to this, so that every wait ends.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Settings of a group of threads, or of a rank of a group of processes.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for others, at the start and in calls; 60 s by default, a day at
    /// most.
    pub timeout: Duration,
    /// Calls each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Where flight recorders are written on the first error; nowhere by default. See
    /// [`FlightRecorder::dump`]. A group of processes that a split has made writes into a folder
    /// of its own below this one.
    pub dump_folder: Option<PathBuf>,
    /// Instruction set of reductions; the widest by default. Changes no bits.
    pub level: Level,
    /// Bytes of its part that a rank reduces before it looks again, 512 KiB by default. Where
    /// parts are longer, a rank that is done with its own goes on with what is left of the
    /// others': cores are never equally fast, and a rank whose core the system has given away for
    /// a while would keep all others waiting. Changes no bits.
    pub claim_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            recorded_calls: 256,
            dump_folder: None,
            level: Level::detect(),
            claim_bytes: 512 << 10,
        }
    }
}

/// One rank of a group of threads; see [`thread_ranks`].
///
/// Giving it up while others still use theirs ends their calls with [`CollectiveError::Left`], or
/// [`CollectiveError::Panicked`] if its thread panicked.
///
/// # Cost
/// Each rank reduces its part of every buffer where it lies; nothing is copied through mailboxes
/// and nothing is allocated, except by an all-to-all in place and by calls of more than 16 ranks.
/// Two waits for all ranks per call.
#[derive(Debug)]
pub struct ThreadCommunicator {
    group: Arc<Group>,
    rank: usize,
    participant: Participant<Header, CollectiveError>,
    sequence: u64,
    context: CallContext,
    /// Ends of the parts of the writable memory, made anew by each call.
    ends: Vec<usize>,
    /// Seats for transfers, by sender and receiver, and how many there were.
    pairs: HashMap<(usize, usize), (Participant<Header, CollectiveError>, u64)>,
    recorder: FlightRecorder,
}

/// The ranks of a new group of `world_size` threads, in rank order; each goes to a thread of its
/// own.
pub fn thread_ranks(world_size: usize, options: &Options) -> Vec<ThreadCommunicator> {
    let mut options = options.clone();
    options.timeout = options.timeout.min(MAX_TIMEOUT);
    let (group, participants) = Group::new(world_size, options);
    let participants = participants.into_iter().enumerate();
    participants
        .map(|(rank, participant)| ThreadCommunicator::new(Arc::clone(&group), rank, participant))
        .collect()
}

/// Runs `body` on one thread for each of `world_size` ranks and returns what each returned or
/// panicked with, in rank order.
///
/// # Errors
/// Of [`InvalidInput`](std::io::ErrorKind::InvalidInput) for no ranks, which would run nothing. The
/// operating system's if a thread cannot be started; those that were started get an error from
/// their communicators.
pub fn run_ranks<R: Send>(
    world_size: usize,
    options: &Options,
    body: impl Fn(ThreadCommunicator) -> R + Sync,
) -> std::io::Result<Vec<std::thread::Result<R>>> {
    if world_size == 0 {
        let found = "ranks: expected 1 or more, found 0, of which none would run";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, found));
    }
    let mut ranks = thread_ranks(world_size, options).into_iter();
    let body = &body;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for comm in ranks.by_ref() {
            let builder = std::thread::Builder::new().name(format!("rank-{}", comm.rank));
            threads.push(builder.spawn_scoped(scope, move || body(comm))?);
        }
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

impl ThreadCommunicator {
    fn new(
        group: Arc<Group>,
        rank: usize,
        participant: Participant<Header, CollectiveError>,
    ) -> Self {
        let (world_size, options) = (group.world_size, &group.options);
        let recorder = FlightRecorder::new(rank, world_size, options.recorded_calls, group.begun);
        Self {
            rank,
            participant,
            sequence: 0,
            context: CallContext::default(),
            ends: vec![0; world_size],
            pairs: HashMap::new(),
            recorder: recorder.dumped_into(options.dump_folder.clone()),
            group,
        }
    }

    /// Writes an outcome down; an error closes the group for everyone, and the first one holds.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| self.group.close(error));
        self.recorder.end(outcome.as_ref().map(|_| ()));
        outcome
    }

    /// A call that this rank cannot make.
    fn refuse<T>(&mut self, error: CollectiveError) -> Result<T, CollectiveError> {
        let error = self.group.close(error);
        self.recorder.dump_once();
        Err(error)
    }

    /// The header of the next call, and its deadline.
    fn header(&mut self, fingerprint: Fingerprint, placement: Placement) -> (Header, Instant) {
        let arrived_ns = self.recorder.begin(&fingerprint);
        let deadline =
            self.group.begun + Duration::from_nanos(arrived_ns) + self.group.options.timeout;
        let header = Header { fingerprint, placement, arrived_ns, membership: None };
        (header, deadline)
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let blocks = call.blocks(self.rank, self.world_size());
        let blocks = blocks.or_else(|error| self.refuse(error))?;
        let outcome = match call.operation.pair(self.rank) {
            Some(pair) => self.transfer(call, blocks.numel, pair),
            None => {
                self.sequence += 1;
                self.collective(call, blocks)
            }
        };
        self.end(outcome)
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        self.sequence += 1;
        let outcome = self.join_subgroup(membership);
        let joined = self.end(outcome)?;
        Ok(joined.map(|(group, rank, participant)| {
            Box::new(Self::new(group, rank, participant)) as Box<dyn Communicator>
        }))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let close = |group: &Group, error| drop(group.close(error));
        Aborter::of(self.rank, &self.group, close, Group::failure)
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let blocks = call.blocks(self.rank, self.world_size());
        let blocks = blocks.or_else(|error| self.refuse(error))?;
        self.sequence += 1;
        let outcome = self.update_everywhere(call, blocks, work);
        self.end(outcome)
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.group.failure()
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        let (rank, calls) = (self.rank, self.recorder.calls_begun());
        if std::thread::panicking() {
            self.recorder.dump_once();
            self.group.close(CollectiveError::Panicked { rank, calls });
        } else {
            self.group.close(CollectiveError::Left { rank, calls });
        }
    }
}

#[cfg(test)]
mod tests {
    use fusestep_tensor::DType;

    use super::*;
    use crate::{Buffers, Operation};

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
        let outcome = ranks[waiting].transfer(call, 1, (silent, waiting));
        assert!(
            matches!(&outcome, Err(CollectiveError::Late { ranks, .. }) if *ranks == [silent]),
            "{outcome:?}"
        );
        assert_eq!(ranks[last].group.behind(last, &[waiting]), [silent]);
    }
}
