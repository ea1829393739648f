//! Settings, and what can go wrong before there is a communicator.

use std::path::PathBuf;
use std::time::Duration;

/// The oldest NCCL that will do, 2.14.0 as NCCL counts: the first with communicators that do not
/// block their callers.
pub const MIN_VERSION: u32 = 21_400;

/// Who adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Each rank reduces its part in rank order: the bits of every other engine, the same on all
    /// ranks, run after run.
    #[default]
    Reproducible,
    /// An all-reduce or reduce is NCCL's own: fewer steps, in an order of its choice, so its bits
    /// are no part of any promise. Reduce-scatter, which NCCL has for equal blocks only, and
    /// u16 are as in `Reproducible`.
    Engine,
}

/// Settings of the ranks of a group; the same on all of them.
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// How long a rank waits for data, and for NCCL to connect; 60 s by default, a day at most.
    /// How long it waits for other ranks to come to a call is the control communicator's.
    pub timeout: Duration,
    /// Calls each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Where flight recorders are written on the first error; nowhere by default.
    pub dump_folder: Option<PathBuf>,
    /// Who adds up.
    pub reduction: Reduction,
    /// Bytes of device memory that each communicator, subgroups and communication streams included,
    /// has from its founding on for what other ranks contribute to a reduction, and as many again
    /// for host buffers on their way; 32 MiB by default, so 64 MiB in all. Nothing is allocated
    /// within a call: longer ones pass through in segments, with the same bits, each segment a
    /// group of transfers more. At least 256 bytes for each rank are taken.
    pub scratch_bytes: usize,
    /// The NCCL to load; by default `libnccl.so.2`, as the system finds it.
    pub nccl_library: PathBuf,
    /// The CUDA driver to load; by default `libcuda.so.1`, as the system finds it.
    pub driver_library: PathBuf,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            recorded_calls: 256,
            dump_folder: None,
            reduction: Reduction::default(),
            scratch_bytes: 32 << 20,
            nccl_library: "libnccl.so.2".into(),
            driver_library: "libcuda.so.1".into(),
        }
    }
}

/// Why there is no communicator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// A library cannot be loaded.
    #[error("nccl: expected the library {library}, found none that loads ({reason}); {remedy}")]
    MissingLibrary {
        /// Its name or path.
        library: String,
        /// The loader's words.
        reason: String,
        /// What would work.
        remedy: &'static str,
    },
    /// A library lacks a function.
    #[error("nccl: expected `{symbol}` in {library}, found none; install a newer one")]
    MissingSymbol {
        /// Its name or path.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The NCCL is too old.
    #[error(
        "nccl: expected NCCL {expected} or newer, found {found} in {library}; install a newer one"
    )]
    OldLibrary {
        /// Its name or path.
        library: String,
        /// The oldest that will do.
        expected: String,
        /// Its version.
        found: String,
    },
    /// Processes could not meet in a folder.
    #[error("nccl: rank {rank} in {}: {reason}", folder.display())]
    Meeting {
        /// The folder.
        folder: PathBuf,
        /// The rank that says so.
        rank: usize,
        /// What was expected, what was found, and what would work.
        reason: String,
    },
    /// Ranks have different versions.
    #[error(
        "nccl: expected NCCL {expected} as on rank 0, found {found} on rank {rank}; install the \
         same on all machines"
    )]
    VersionsDiffer {
        /// The lowest rank that differs.
        rank: usize,
        /// The version of rank 0.
        expected: String,
        /// Its own.
        found: String,
    },
    /// Ranks would cut calls into different segments.
    #[error(
        "nccl: expected `scratch_bytes` of {expected} as on rank 0, found {found} on rank {rank}; \
         pass the same on all ranks"
    )]
    ScratchDiffers {
        /// The lowest rank that differs.
        rank: usize,
        /// The value of rank 0.
        expected: u64,
        /// Its own.
        found: u64,
    },
    /// There is no such device.
    #[error(
        "nccl: rank {rank} expected GPU {device}, found {count} of them; use fewer ranks on this \
         machine, or other GPUs"
    )]
    NoSuchDevice {
        /// The rank that asked.
        rank: usize,
        /// What it asked for.
        device: usize,
        /// How many there are.
        count: usize,
    },
    /// Two ranks use one GPU, on which NCCL may hang.
    #[error(
        "nccl: expected a GPU for each rank, found ranks {first} and {second} on the same one, \
         GPU {device} ({name}); NCCL cannot run two ranks on one GPU"
    )]
    SharedDevice {
        /// The lower rank.
        first: usize,
        /// The other.
        second: usize,
        /// The GPU's index as the lower rank counts.
        device: usize,
        /// The GPU's name.
        name: String,
    },
    /// Another rank could not make its part.
    #[error("nccl: rank {rank} could not join: {reason}")]
    Peer {
        /// The lowest such rank.
        rank: usize,
        /// Its error, shortened.
        reason: String,
    },
    /// NCCL did not connect the ranks in time.
    #[error(
        "nccl: expected the ranks to be connected within {timeout_ms} ms, found NCCL still at it; \
         see that their machines reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), or raise \
         the timeout"
    )]
    NotConnected {
        /// How long was waited.
        timeout_ms: u64,
    },
    /// A call of NCCL or of the driver failed.
    #[error("nccl: {call}: {reason}")]
    Call {
        /// Which.
        call: &'static str,
        /// The library's words.
        reason: String,
    },
    /// The control communicator failed.
    #[error("nccl: the control communicator: {0}")]
    Control(fusestep_collective::CollectiveError),
}

#[cfg(feature = "nccl")]
impl NcclError {
    /// The error of this call, for the library's words.
    pub(crate) fn of_call(call: &'static str) -> impl Fn(String) -> Self {
        move |reason| Self::Call { call, reason }
    }
}

/// A version as people write it. NCCL counts 2.8.4 as 2804 and, from 2.9 on, 2.9.6 as 20906.
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
pub(crate) fn version_text(code: u32) -> String {
    if code < 10_000 {
        format!("{}.{}.{}", code / 1000, code / 100 % 10, code % 100)
    } else {
        format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_do() {
        for (code, text) in [(2804, "2.8.4"), (20_906, "2.9.6"), (22_703, "2.27.3")] {
            assert_eq!(version_text(code), text);
        }
        assert_eq!(version_text(MIN_VERSION), "2.14.0");
    }
}
