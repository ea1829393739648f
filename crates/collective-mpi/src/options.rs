//! Settings of the engine, and errors of making a communicator.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use fusestep_collective::{ALONE_REMEDY, Started};
use fusestep_simd::Level;

/// Code that adds up: this crate's, or the MPI's own all-reduce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Each rank reduces its part in rank order: the bits of every other engine, the same on all
    /// ranks, run after run.
    #[default]
    Reproducible,
    /// The MPI's own all-reduce adds f32, f64, i32 and i64, faster or slower. It chooses the order,
    /// so no bits are promised. Everything else, 16-bit types and bytes included, is as in
    /// `Reproducible`. Takes an MPI that is safe to call from several threads at once
    /// (`MPI_THREAD_MULTIPLE`).
    Engine,
}

/// Calls whose fingerprints ranks compare before data moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compare {
    /// Every call is compared, by one exchange of short messages. Late ranks are named and the
    /// caller gets an error.
    #[default]
    EveryCall,
    /// The first call of its kind is compared: of the same operation, dtype, lengths, plan and
    /// bucket. That saves the exchange from the second pass through a plan on. A rank that is late
    /// then is found while data moves, which only ending the job can break off.
    FirstOfEach,
}

/// Settings of the ranks of an MPI job; the same on all of them.
#[derive(Clone, Debug)]
pub struct MpiOptions {
    /// Time for which a rank waits for others; 60 s by default, a day at most.
    pub timeout: Duration,
    /// Time for which a rank that has left waits for the others to leave before it ends the job; an
    /// hour by default.
    pub leave_timeout: Duration,
    /// Number of calls that each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Folder to which flight recorders are written on the first error, and when the launcher ends
    /// the job; none by default.
    pub dump_folder: Option<PathBuf>,
    /// Instruction set of reductions; the widest by default. Changes no bits.
    pub level: Level,
    /// Code that adds up.
    pub reduction: Reduction,
    /// Calls whose fingerprints are compared. Ranks that share memory compare every call, which
    /// costs next to nothing.
    pub compare: Compare,
    /// Whether ranks use shared memory if all of them run on one machine, as the engine of
    /// processes does; yes by default. Calls of [`Reduction::Engine`] go through MPI in any case.
    /// Changes no bits.
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

/// Error of making a communicator. Its `Debug` form is its message, since a `main` that returns the
/// error prints that form.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
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
        /// Level that is needed.
        expected: &'static str,
        /// Level that the MPI gave.
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
    /// MPI knows of this process alone, though a launcher has started several. The launcher is not
    /// one of MPI, or belongs to another MPI than the program was built with.
    #[error(
        "mpi: {started}, and MPI knows of one; expected the mpirun of the MPI that this program \
         was built with to start them, or {ALONE_REMEDY}"
    )]
    Alone {
        /// Words of the launcher.
        started: Box<Started>,
    },
    /// A call of MPI failed.
    #[error("mpi: {call}: {reason}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// MPI's words.
        reason: String,
    },
}

impl fmt::Debug for MpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(feature = "mpi")]
impl MpiError {
    /// Makes errors of this call from MPI's words.
    pub(crate) fn of_call(call: &'static str) -> impl Fn(String) -> Self {
        move |reason| Self::Call { call, reason }
    }
}
