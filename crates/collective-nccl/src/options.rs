//! Settings of the engine, and errors of making a communicator.

use std::path::PathBuf;
use std::time::Duration;

/// Oldest NCCL that works, 2.14.0 in NCCL's numbers: the first with communicators that do not block
/// their callers.
pub const MIN_VERSION: u32 = 21_400;

/// Code that adds up: this crate's, or NCCL's own all-reduce and reduce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Each rank reduces its part in rank order: the bits of every other engine, the same on all
    /// ranks, run after run.
    #[default]
    Reproducible,
    /// NCCL's own all-reduce and reduce add up, in fewer steps. NCCL chooses the order, so no bits
    /// are promised. Reduce-scatter, which NCCL has for equal blocks only, and u16 are as in
    /// `Reproducible`.
    Engine,
}

/// Settings of the ranks of a group; the same on all of them.
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// Time for which a rank waits for data, and for NCCL to connect; 60 s by default, a day at
    /// most. The control communicator has its own timeout for ranks that are late to a call.
    pub timeout: Duration,
    /// Number of calls that each flight recorder keeps; 256 by default.
    pub recorded_calls: usize,
    /// Folder to which flight recorders are written on the first error; none by default.
    pub dump_folder: Option<PathBuf>,
    /// Code that adds up.
    pub reduction: Reduction,
    /// Bytes of device memory for other ranks' contributions to a reduction, and as many again for
    /// host buffers on their way. 32 MiB by default, so 64 MiB in all. Each communicator has its
    /// own from its founding on, subgroups and communication streams included. Nothing is allocated
    /// within a call: longer calls pass through in segments, with the same bits. Each segment costs
    /// one more group of transfers. At least 256 bytes for each rank are taken.
    pub scratch_bytes: usize,
    /// Path or name of the NCCL to load; by default `libnccl.so.2`, as the system finds it.
    pub nccl_library: PathBuf,
    /// Path or name of the CUDA driver to load; by default `libcuda.so.1`, as the system finds it.
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

/// Error of making a communicator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// A library cannot be loaded.
    #[error("nccl: expected the library {library}, found none that loads ({reason}); {remedy}")]
    MissingLibrary {
        /// Name or path of the library.
        library: String,
        /// The loader's words.
        reason: String,
        /// Hint at an installation or an engine that would work.
        remedy: &'static str,
    },
    /// A library lacks a function.
    #[error("nccl: expected `{symbol}` in {library}, found none; install a newer one")]
    MissingSymbol {
        /// Name or path of the library.
        library: String,
        /// Name of the function.
        symbol: &'static str,
    },
    /// The NCCL is too old.
    #[error(
        "nccl: expected NCCL {expected} or newer, found {found} in {library}; install a newer one"
    )]
    OldLibrary {
        /// Name or path of the library.
        library: String,
        /// Oldest version that works.
        expected: String,
        /// Version of the library found.
        found: String,
    },
    /// Processes could not meet in a folder.
    #[error("nccl: rank {rank} in {}: {reason}", folder.display())]
    Meeting {
        /// Folder in which they tried to meet.
        folder: PathBuf,
        /// Rank that reports the error.
        rank: usize,
        /// Text with the expected value, the value found, and what to do.
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
        /// The version of `rank`.
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
        /// The value of `rank`.
        found: u64,
    },
    /// There is no such device.
    #[error(
        "nccl: rank {rank} expected GPU {device}, found {count} of them; use fewer ranks on this \
         machine, or other GPUs"
    )]
    NoSuchDevice {
        /// Rank that asked for the GPU.
        rank: usize,
        /// Index of the GPU that the rank asked for.
        device: usize,
        /// Number of GPUs on the machine.
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
    /// Another rank could not make its part of the communicator.
    #[error("nccl: rank {rank} could not join: {reason}")]
    Peer {
        /// The lowest such rank.
        rank: usize,
        /// Error of that rank, shortened.
        reason: String,
    },
    /// NCCL did not connect the ranks in time.
    #[error(
        "nccl: expected the ranks to be connected within {timeout_ms} ms, found NCCL still at it; \
         see that their machines reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), or raise \
         the timeout"
    )]
    NotConnected {
        /// Time that this rank waited.
        timeout_ms: u64,
    },
    /// A call of NCCL or of the driver failed.
    #[error("nccl: {call}: {reason}")]
    Call {
        /// Name of the call.
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
    /// Makes errors of this call from the library's words.
    pub(crate) fn of_call(call: &'static str) -> impl Fn(String) -> Self {
        move |reason| Self::Call { call, reason }
    }
}

/// A version as people write it. NCCL's number for 2.8.4 is 2804 and, from 2.9 on, for 2.9.6 it is
/// 20906.
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
