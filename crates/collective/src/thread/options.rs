//! Settings of ranks that share a machine.

use std::path::PathBuf;
use std::time::Duration;

use fusestep_simd::Level;

use crate::{CallOptions, Timeout};

/// Settings of a group of threads, or of a rank of a group of processes.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for other ranks, at the start and in calls; 60 s by default, a day at
    /// most.
    pub timeout: Duration,
    /// Calls each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Folder that flight recorders are written to on the first error; none by default. See
    /// [`FlightRecorder::dump`](crate::FlightRecorder::dump). A group that a split has made writes
    /// into a folder of its own below this one.
    pub dump_folder: Option<PathBuf>,
    /// Instruction set of reductions; the widest by default. Changes no bits.
    pub level: Level,
    /// Bytes of its part that a rank reduces before it claims more; 512 KiB by default. Where parts
    /// are longer, a rank that is done with its own part goes on with the rest of other parts.
    /// Cores are never equally fast: a rank whose core the system has given away for a while would
    /// keep all other ranks waiting. Changes no bits.
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

impl From<&Options> for CallOptions {
    fn from(options: &Options) -> Self {
        Self {
            timeout: Timeout::new(options.timeout),
            recorded_calls: options.recorded_calls,
            dump_folder: options.dump_folder.clone(),
        }
    }
}
