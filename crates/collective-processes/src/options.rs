//! Settings, and what can go wrong before there is a communicator.

use std::path::PathBuf;
use std::time::Duration;

use fusestep_simd::Level;

/// Settings of a group of processes; each rank has its own.
#[derive(Clone, Debug)]
pub struct ProcessOptions {
    /// How long a rank waits for others, at the start and in calls; 60 s by default, a day at
    /// most.
    pub timeout: Duration,
    /// Calls each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Where flight recorders are written on the first error; nowhere by default. A group made by
    /// a split writes into a folder of its own below this one.
    pub dump_folder: Option<PathBuf>,
    /// Instruction set of reductions; the widest by default. Changes no bits.
    pub level: Level,
    /// Bytes of its part that a rank reduces before it looks again, 512 KiB by default; as
    /// [`Options::claim_bytes`](fusestep_collective::Options::claim_bytes). Changes no bits.
    pub claim_bytes: usize,
}

impl Default for ProcessOptions {
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
