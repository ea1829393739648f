//! The flight recorder: what a rank did last.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fusestep_tensor::DType;
use serde::Serialize;

use crate::{CollectiveError, Fingerprint, ReduceOp};

/// How far a call came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CallState {
    /// Not back yet; in a dump of a rank that panicked, the call it panicked in.
    Running,
    /// Returned its result.
    Done,
    /// Returned the error of this text.
    Failed(String),
}

/// One call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRecord {
    /// Number within the group, from 1.
    pub sequence: u64,
    /// Name of the operation.
    pub operation: &'static str,
    /// By what it reduces.
    pub reduce: Option<ReduceOp>,
    /// The elements' type.
    pub dtype: DType,
    /// Bytes of the whole.
    pub len_bytes: u64,
    /// Root, or the other side of a transfer.
    pub root: Option<usize>,
    /// The bucket it was for.
    pub bucket: Option<u32>,
    /// The plan it was of.
    pub plan_hash: u64,
    /// Nanoseconds from the recorder's beginning to the call.
    pub started_ns: u64,
    /// Nanoseconds from the recorder's beginning to the return; 0 while running.
    pub ended_ns: u64,
    /// The rank that came last to this call, where the engine can tell.
    pub straggler: Option<usize>,
    /// Nanoseconds between this rank's coming and the straggler's.
    pub waited_ns: u64,
    /// How far it came.
    pub state: CallState,
}

/// The last calls of one rank, in a ring of fixed length.
///
/// # Cost
/// A few words per call and no allocation while calls succeed.
#[derive(Debug)]
pub struct FlightRecorder {
    rank: usize,
    world_size: usize,
    capacity: usize,
    begun: Instant,
    calls: VecDeque<CallRecord>,
    total: u64,
}

#[derive(Serialize)]
struct Dump<'a> {
    rank: usize,
    world_size: usize,
    calls_begun: u64,
    calls: &'a VecDeque<CallRecord>,
}

impl FlightRecorder {
    /// A recorder of the last `capacity` calls, at least 1, of `rank`. Times count from `begun`.
    pub fn new(rank: usize, world_size: usize, capacity: usize, begun: Instant) -> Self {
        let capacity = capacity.max(1);
        Self {
            rank,
            world_size,
            capacity,
            begun,
            calls: VecDeque::with_capacity(capacity),
            total: 0,
        }
    }

    /// The calls kept, oldest first.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = &CallRecord> {
        self.calls.iter()
    }

    /// How many calls were begun in all.
    pub fn calls_begun(&self) -> u64 {
        self.total
    }

    /// Writes down that a call begins; returns the nanosecond it began in.
    pub fn begin(&mut self, fingerprint: &Fingerprint) -> u64 {
        if self.calls.len() == self.capacity {
            self.calls.pop_front();
        }
        self.total += 1;
        let started_ns = self.now_ns();
        self.calls.push_back(CallRecord {
            sequence: fingerprint.sequence,
            operation: fingerprint.operation.name(),
            reduce: fingerprint.operation.reduce_op(),
            dtype: fingerprint.dtype,
            len_bytes: fingerprint.numel * fingerprint.dtype.len_bytes() as u64,
            root: fingerprint.operation.root(),
            bucket: fingerprint.context.bucket,
            plan_hash: fingerprint.context.plan_hash,
            started_ns,
            ended_ns: 0,
            straggler: None,
            waited_ns: 0,
            state: CallState::Running,
        });
        started_ns
    }

    /// Writes down who came last to the call that is running, and how long after this rank.
    pub fn waited(&mut self, straggler: usize, waited_ns: u64) {
        if let Some(call) = self.calls.back_mut() {
            call.straggler = Some(straggler);
            call.waited_ns = waited_ns;
        }
    }

    /// Writes down how the call that is running ended.
    pub fn end(&mut self, outcome: Result<(), &CollectiveError>) {
        let ended_ns = self.now_ns();
        if let Some(call) = self.calls.back_mut() {
            call.ended_ns = ended_ns;
            call.state = match outcome {
                Ok(()) => CallState::Done,
                Err(error) => CallState::Failed(error.to_string()),
            };
        }
    }

    /// Everything kept, as JSON.
    pub fn to_json(&self) -> String {
        let dump = Dump {
            rank: self.rank,
            world_size: self.world_size,
            calls_begun: self.total,
            calls: &self.calls,
        };
        serde_json::to_string_pretty(&dump).expect("records are plain data with text keys")
    }

    /// Writes [`to_json`](Self::to_json) to `flight-recorder-rank-R.json` in `folder`, which is made if need be.
    ///
    /// # Errors
    /// The operating system's.
    pub fn dump(&self, folder: &Path) -> std::io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("flight-recorder-rank-{}.json", self.rank));
        std::fs::write(&path, self.to_json())?;
        Ok(path)
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
