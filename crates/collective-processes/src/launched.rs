//! What `launch` takes and gives, on every system.

use std::ffi::OsString;
use std::time::Duration;

/// What to start, how often, and how long to wait when something fails.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The number of processes.
    pub ranks: usize,
    /// The program.
    pub program: OsString,
    /// Its arguments, the same for all ranks.
    pub arguments: Vec<OsString>,
    /// How long the others may go on when one has failed: they find out who it was, write flight
    /// recorders and end by themselves. 2 s by default.
    pub grace: Duration,
}

impl LaunchOptions {
    /// `program` as `ranks` processes.
    pub fn new(ranks: usize, program: impl Into<OsString>) -> Self {
        Self {
            ranks,
            program: program.into(),
            arguments: Vec::new(),
            grace: Duration::from_secs(2),
        }
    }
}

/// How the processes have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The exit code of the first rank that failed, 128 and the signal if it died of one; 0 if
    /// none did.
    pub code: u8,
    /// The first rank that failed.
    pub failed: Option<usize>,
}
