//! What can go wrong before there is a communicator.

/// Why there is no communicator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The system lacks what the engine is made of.
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
        /// What it should say.
        expected: String,
        /// What it says.
        found: String,
    },
    /// The launcher has started processes on several machines.
    #[error(
        "processes: expected all {world_size} ranks on this machine, found {local} here; ranks of \
         this engine share one machine's memory, so use MPI or NCCL between machines"
    )]
    SeveralMachines {
        /// All ranks.
        world_size: usize,
        /// Those of this machine.
        local: usize,
    },
    /// The system refused memory that processes share.
    #[error("processes: {what}: {reason}")]
    System {
        /// What was tried.
        what: String,
        /// The system's words.
        reason: String,
    },
    /// The session's name is taken.
    #[error(
        "processes: expected no other rank {rank} in session {session}, found process {process}; \
         give each start a session of its own (FUSESTEP_SESSION)"
    )]
    Taken {
        /// The rank.
        rank: usize,
        /// The session.
        session: String,
        /// Who has it.
        process: u64,
    },
    /// Ranks were told different numbers of ranks.
    #[error("processes: expected {expected} ranks as rank 0 says, found {found} on rank {rank}")]
    WorldSize {
        /// What rank 0 was told.
        expected: u64,
        /// What this one was told.
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
        /// Those that did not come.
        ranks: Vec<usize>,
        /// All ranks.
        world_size: usize,
        /// The session.
        session: String,
        /// How long was waited.
        timeout_ms: u64,
    },
    /// A rank came and died before all others had come.
    #[error(
        "processes: expected all ranks to stay, found rank {rank} dead before all had come; see \
         what its process printed"
    )]
    Died {
        /// Which.
        rank: usize,
    },
}
