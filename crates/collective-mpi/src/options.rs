//! Settings, and what can go wrong before there is a communicator.

use std::path::PathBuf;
use std::time::Duration;

use fusestep_simd::Level;

/// Who adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Each rank reduces its part in rank order: the bits of every other engine, the same on all
    /// ranks, run after run.
    #[default]
    Reproducible,
    /// An all-reduce of f32, f64, i32 and i64 is the MPI's own: faster or slower, in an order of
    /// its choice, so its bits are no part of any promise. Everything else, 16-bit types and
    /// bytes included, is as in `Reproducible`. Takes an MPI that is safe to call from several
    /// threads at once (`MPI_THREAD_MULTIPLE`).
    Engine,
}

/// When ranks compare the fingerprints of a call before its data moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compare {
    /// At every call. One exchange of short messages; late ranks are named and the caller gets an
    /// error.
    #[default]
    EveryCall,
    /// At the first call of its kind: of the same operation, dtype, lengths, plan and bucket. Saves
    /// the exchange from the second pass through a plan on. A rank that is late then is found
    /// while data moves, which only ending the job can break off.
    FirstOfEach,
}

/// Settings of the ranks of an MPI job; the same on all of them.
#[derive(Clone, Debug)]
pub struct MpiOptions {
    /// How long a rank waits for others; 60 s by default, a day at most.
    pub timeout: Duration,
    /// How long a rank that has left in good order waits for the others to leave before it ends
    /// the job; an hour by default.
    pub leave_timeout: Duration,
    /// Calls each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Where flight recorders are written on the first error, and when the launcher ends the job;
    /// nowhere by default.
    pub dump_folder: Option<PathBuf>,
    /// Instruction set of reductions; the widest by default. Changes no bits.
    pub level: Level,
    /// Who adds up.
    pub reduction: Reduction,
    /// When fingerprints are compared. Ranks that share memory compare every call: it costs them
    /// next to nothing.
    pub compare: Compare,
    /// Whether ranks use each other's memory where all of them run on one machine, as the engine
    /// of processes does; yes by default. Not with [`Reduction::Engine`], whose calls are
    /// MPI's. Changes no bits.
    pub share_memory: bool,
    /// Most bytes of one message; 1 GiB by default, cut to what MPI counts. Changes no bits.
    pub chunk_limit_bytes: usize,
    /// Bytes of a rank's part of a reduction that are under way at a time; 1 MiB by default.
    /// Changes no bits.
    pub segment_bytes: usize,
}

impl Default for MpiOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            leave_timeout: Duration::from_secs(3600),
            recorded_calls: 256,
            dump_folder: None,
            level: Level::detect(),
            reduction: Reduction::default(),
            compare: Compare::default(),
            share_memory: true,
            chunk_limit_bytes: 1 << 30,
            segment_bytes: 1 << 20,
        }
    }
}

/// Why there is no communicator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// MPI starts once in a process.
    #[error(
        "mpi: expected the first start in this process, found MPI started already; keep the first \
         communicator and split it"
    )]
    AlreadyStarted,
    /// The MPI cannot be called from as many threads as needed.
    #[error(
        "mpi: expected thread level {expected} or more, found {found}; use an MPI built for \
         threads, or the reproducible reduction if it is the engine's that asks for so much"
    )]
    ThreadLevel {
        /// What is needed.
        expected: &'static str,
        /// What the MPI gave.
        found: &'static str,
    },
    /// Processes of the job were started with other settings than this one.
    #[error(
        "mpi: expected the same engine and options on all processes, found {own} here and another \
         elsewhere; start all with --engine mpi or all with --engine mpi-native"
    )]
    Differs {
        /// The settings of this process.
        own: String,
    },
    /// A call of MPI failed.
    #[error("mpi: {call}: {reason}")]
    Call {
        /// Which.
        call: &'static str,
        /// MPI's words.
        reason: String,
    },
}

#[cfg(feature = "mpi")]
impl MpiError {
    /// The error of this call, for MPI's words.
    pub(crate) fn of_call(call: &'static str) -> impl Fn(String) -> Self {
        move |reason| Self::Call { call, reason }
    }
}
