//! Options and outcome of `launch`, on every system.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Program to start, its number of ranks, and times to wait when something fails.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The number of processes.
    pub ranks: usize,
    /// The program.
    pub program: OsString,
    /// The program's arguments, the same for all ranks.
    pub arguments: Vec<OsString>,
    /// How long other ranks may go on when one has failed: they find out which it was, write flight
    /// recorders and end by themselves. 2 s by default.
    pub grace: Duration,
    /// How long ranks may take to end after a signal that was passed on to them, before they are
    /// killed. Processes that they have started have as long from the ranks' end on. 10 s by
    /// default.
    pub patience: Duration,
    /// A program that runs beside this process, and whose `main` calls [`guard`](crate::guard)
    /// first. If this process is killed, the guard ends all that the ranks have started. None by
    /// default; then processes that ranks have started outlive a launcher that SIGKILL ends.
    pub guard: Option<OsString>,
    /// Beginning of lines that ranks print. None by default.
    pub prefix: Prefix,
    /// A folder that is there, in which each rank's output goes to a file `rank-N.log`; without a
    /// prefix to that alone. None by default.
    pub log_folder: Option<PathBuf>,
}

/// Beginning of the lines that ranks print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// None: ranks print for themselves, and lines may meet.
    #[default]
    None,
    /// The rank, `[rank 3] `. Lines are passed on whole, each to the output that it was meant for.
    Rank,
}

impl LaunchOptions {
    /// Options to start `program` as `ranks` processes.
    pub fn new(ranks: usize, program: impl Into<OsString>) -> Self {
        Self {
            ranks,
            program: program.into(),
            arguments: Vec::new(),
            grace: Duration::from_secs(2),
            patience: Duration::from_secs(10),
            guard: None,
            prefix: Prefix::None,
            log_folder: None,
        }
    }
}

/// Outcome of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The exit code of the first rank that failed, or 128 and the signal if it died of a signal; 0
    /// if no rank failed.
    pub code: u8,
    /// The first rank that failed.
    pub failed: Option<usize>,
    /// Whether the ranks have met by this engine. Programs may meet by other means.
    pub met: bool,
}
