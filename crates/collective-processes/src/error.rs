//! Errors of processes that find no communicator.

use std::fmt;

use fusestep_collective::{ALONE_REMEDY, Started};

/// Largest number of ranks in a session, whose shared memory has places for all their transfers.
pub const MAX_RANKS: usize = 1024;

/// Error of a process that found no communicator.
///
/// The `Debug` form is the message, which a `main` that returns the error prints.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The system is not Linux and lacks the calls that the engine is made of.
    #[error("processes: expected Linux, found another system; use ranks that are threads, or MPI")]
    NotHere,
    /// The launcher's variables do not say which rank this is.
    #[error(
        "processes: expected {expected}, found {variable}={found}; start the program with \
         `fusestep launch -n N -- PROGRAM` or torchrun"
    )]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Value that it should have.
        expected: String,
        /// Value that it has.
        found: String,
    },
    /// The launcher has started processes on several machines.
    #[error(
        "processes: expected all {world_size} ranks on this machine, found {local} here; ranks of \
         this engine share one machine's memory, so start the program with mpirun and use MPI \
         (--engine mpi) or NCCL between machines, or {ALONE_REMEDY}"
    )]
    SeveralMachines {
        /// All ranks.
        world_size: usize,
        /// Ranks of this machine.
        local: usize,
    },
    /// Another launcher has started this process as one of several, and tells it neither a rank nor
    /// an address by which ranks of this engine find each other.
    #[error(
        "processes: {started}, and each would take itself for the whole; expected RANK, WORLD_SIZE \
         and an address, as `fusestep launch -n N -- PROGRAM` and torchrun tell; use MPI (--engine \
         mpi) under this launcher, or {ALONE_REMEDY}"
    )]
    OtherLauncher {
        /// The launcher's words about this process.
        started: Box<Started>,
    },
    /// The rank is not below the number of ranks, or that number is out of range.
    #[error(
        "processes: expected a rank below the number of ranks, which is from 1 to {}, found rank \
         {rank} of {world_size}",
        MAX_RANKS
    )]
    World {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The system refused memory that processes share.
    #[error("processes: {what}: {reason}")]
    System {
        /// Call that was tried.
        what: String,
        /// The system's words.
        reason: String,
    },
    /// Another process has this rank of the session.
    #[error(
        "processes: expected no other rank {rank} in session {session}, found process {process}; \
         give each start a session of its own (FUSESTEP_SESSION)"
    )]
    Taken {
        /// The rank.
        rank: usize,
        /// The session.
        session: String,
        /// Process that has this rank.
        process: u64,
    },
    /// Ranks were told different numbers of ranks.
    #[error("processes: expected {expected} ranks as rank 0 says, found {found} on rank {rank}")]
    WorldSize {
        /// Number that rank 0 was told.
        expected: u64,
        /// Number that this rank was told.
        found: usize,
        /// This rank.
        rank: usize,
    },
    /// Ranks did not come before the deadline.
    #[error(
        "processes: expected {world_size} ranks in session {session} within {timeout_ms} ms, \
         found none of {ranks:?}; see what these processes print, or raise the timeout"
    )]
    Missing {
        /// Ranks that did not come.
        ranks: Vec<usize>,
        /// All ranks.
        world_size: usize,
        /// The session.
        session: String,
        /// How long the rank waited.
        timeout_ms: u64,
    },
    /// A rank came and died before all others had come.
    #[error(
        "processes: expected all ranks to stay, found rank {rank} dead before all had come; see \
         what its process printed"
    )]
    Died {
        /// The rank that died.
        rank: usize,
    },
}

impl fmt::Debug for ProcessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
