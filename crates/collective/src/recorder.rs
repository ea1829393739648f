//! The flight recorder: the last calls of a rank.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fusestep_tensor::DType;
use serde::Serialize;

use crate::{CollectiveError, Divisor, Fingerprint, ReduceOp};

/// The progress of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CallState {
    /// The call has not returned; in a dump of a rank that panicked, the call it panicked in.
    Running,
    /// The call returned its result.
    Done,
    /// The call returned the error of this text.
    Failed(String),
}

/// One call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRecord {
    /// Number within the group, from 1.
    pub sequence: u64,
    /// Name of the operation.
    pub operation: &'static str,
    /// The way in which the call reduces.
    pub reduce: Option<ReduceOp>,
    /// The elements' type.
    pub dtype: DType,
    /// Bytes of the whole.
    pub len_bytes: u64,
    /// Root, or the other side of a transfer.
    pub root: Option<usize>,
    /// The bucket that the call was for.
    pub bucket: Option<u32>,
    /// The plan that made the call.
    pub plan_hash: u64,
    /// Nanoseconds from the recorder's beginning to the call.
    pub started_ns: u64,
    /// Nanoseconds from the recorder's beginning to the return; 0 while running.
    pub ended_ns: u64,
    /// The rank that came last to this call, where the engine can tell.
    pub straggler: Option<usize>,
    /// Nanoseconds between the arrivals of this rank and of the straggler.
    pub waited_ns: u64,
    /// The progress of the call.
    pub state: CallState,
}

/// A call as the recorder keeps it: one cache line, so that many kept calls leave the cache to the
/// work between them.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Kept {
    sequence: u64,
    /// [`Fingerprint::kind`].
    kind: u64,
    numel: u64,
    plan_hash: u64,
    started_ns: u64,
    /// 0 while running.
    ended_ns: u64,
    waited_ns: u64,
    /// The root; of an operation without one the bits of its divisor, as an f32.
    root: u32,
    /// The straggler, or [`NOBODY`] if the engine cannot tell.
    straggler: u32,
}

const _: () = assert!(size_of::<Kept>() == 64);

/// The number that stands for no rank.
const NOBODY: u32 = u32::MAX;

fn rank_bits(rank: Option<usize>) -> u32 {
    rank.map_or(NOBODY, |rank| u32::try_from(rank).unwrap_or(NOBODY))
}

/// The last calls of one rank, in a ring of fixed length.
///
/// # Cost
/// 64 bytes per call, two looks at the clock (some 25 ns each), and no allocation
/// while calls succeed.
#[derive(Debug)]
pub struct FlightRecorder {
    rank: usize,
    world_size: usize,
    capacity: usize,
    /// The time from which nanoseconds count.
    begun: Instant,
    calls: VecDeque<Kept>,
    /// The numbers of failed calls among all calls, from 1, with the errors' texts.
    failures: VecDeque<(u64, String)>,
    total: u64,
    /// The folder that the calls are written into when a call fails.
    folder: Option<PathBuf>,
    dumped: Option<Result<PathBuf, String>>,
    /// A second recorder of the same calls, for other threads.
    mirror: Option<Arc<Mutex<FlightRecorder>>>,
}

#[derive(Serialize)]
struct Dump {
    rank: usize,
    world_size: usize,
    calls_begun: u64,
    calls: Vec<CallRecord>,
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
            failures: VecDeque::new(),
            total: 0,
            folder: None,
            dumped: None,
            mirror: None,
        }
    }

    /// The recorder, written into `folder` when a call fails for the first time.
    pub fn dumped_into(self, folder: Option<PathBuf>) -> Self {
        Self { folder, ..self }
    }

    /// The recorder, with a second one that is told the same, for other threads to write into the
    /// same folder.
    pub fn mirrored(mut self, mirror: Option<Arc<Mutex<FlightRecorder>>>) -> Self {
        self.mirror = mirror;
        let folder = self.folder.clone();
        if let Some(mut mirror) = self.mirror() {
            mirror.folder = folder;
        }
        self
    }

    /// The folder that the calls are written into when a call fails.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    fn mirror(&self) -> Option<MutexGuard<'_, FlightRecorder>> {
        let mirror = self.mirror.as_ref()?;
        Some(mirror.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The calls kept, oldest first.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = CallRecord> {
        let before = self.total - self.calls.len() as u64;
        let numbered = self.calls.iter().enumerate();
        numbered.map(move |(at, kept)| self.record(before + 1 + at as u64, kept))
    }

    fn record(&self, number: u64, kept: &Kept) -> CallRecord {
        let (root, divisor) = (kept.root as usize, f64::from(f32::from_bits(kept.root)));
        let (operation, dtype, bucket) =
            Fingerprint::of_kind(kept.kind, root, Divisor::of(divisor).bits())
                .expect("the word was made of a fingerprint");
        let failure = self.failures.iter().find(|(failed, _)| *failed == number);
        CallRecord {
            sequence: kept.sequence,
            operation: operation.name(),
            reduce: operation.reduce_op(),
            dtype,
            len_bytes: kept.numel * dtype.len_bytes() as u64,
            root: operation.root(),
            bucket,
            plan_hash: kept.plan_hash,
            started_ns: kept.started_ns,
            ended_ns: kept.ended_ns,
            straggler: (kept.straggler != NOBODY).then_some(kept.straggler as usize),
            waited_ns: kept.waited_ns,
            state: match failure {
                Some((_, reason)) => CallState::Failed(reason.clone()),
                None if kept.ended_ns == 0 => CallState::Running,
                None => CallState::Done,
            },
        }
    }

    /// Nanoseconds since the time that the recorder counts from.
    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The number of all calls that were begun.
    pub fn calls_begun(&self) -> u64 {
        self.total
    }

    /// Writes down that a call begins; returns the nanosecond of its beginning.
    pub fn begin(&mut self, fingerprint: &Fingerprint) -> u64 {
        if self.calls.len() == self.capacity {
            self.calls.pop_front();
            let forgotten = self.total + 1 - self.capacity as u64;
            while self.failures.front().is_some_and(|(failed, _)| *failed <= forgotten) {
                self.failures.pop_front();
            }
        }
        self.total += 1;
        let started_ns = self.now_ns();
        self.calls.push_back(Kept {
            sequence: fingerprint.sequence,
            kind: fingerprint.kind(),
            numel: fingerprint.numel,
            plan_hash: fingerprint.context.plan_hash,
            started_ns,
            ended_ns: 0,
            waited_ns: 0,
            root: match (fingerprint.operation.root(), fingerprint.operation.reduce_op()) {
                (None, Some(ReduceOp::Tree(divisor))) => (divisor.value() as f32).to_bits(),
                (root, _) => rank_bits(root),
            },
            straggler: NOBODY,
        });
        if let Some(mut mirror) = self.mirror() {
            mirror.begin(fingerprint);
        }
        started_ns
    }

    /// Writes down the last rank to come to the running call, and how long after this rank it came.
    pub fn waited(&mut self, straggler: usize, waited_ns: u64) {
        if let Some(call) = self.calls.back_mut() {
            call.straggler = rank_bits(Some(straggler));
            call.waited_ns = waited_ns;
        }
        if let Some(mut mirror) = self.mirror() {
            mirror.waited(straggler, waited_ns);
        }
    }

    /// Writes down how the running call ended; on disk too, if it ended in an error.
    pub fn end(&mut self, outcome: Result<(), &CollectiveError>) {
        if let Some(mut mirror) = self.mirror() {
            mirror.end(outcome);
        }
        let ended_ns = self.now_ns();
        if let Some(call) = self.calls.back_mut() {
            call.ended_ns = ended_ns.max(1);
            if self.failures.back().is_some_and(|(failed, _)| *failed == self.total) {
                self.failures.pop_back();
            }
            if let Err(error) = outcome {
                self.failures.push_back((self.total, error.to_string()));
            }
        }
        if outcome.is_err() {
            self.dump_once();
        }
    }

    /// Everything kept, as JSON.
    pub fn to_json(&self) -> String {
        let dump = Dump {
            rank: self.rank,
            world_size: self.world_size,
            calls_begun: self.total,
            calls: self.calls().collect(),
        };
        serde_json::to_string_pretty(&dump).expect("records are plain data with text keys")
    }

    /// Writes [`to_json`](Self::to_json) to `flight-recorder-rank-R.json` in `folder`, which is
    /// made if need be.
    ///
    /// # Errors
    /// The operating system's.
    pub fn dump(&self, folder: &Path) -> std::io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("flight-recorder-rank-{}.json", self.rank));
        std::fs::write(&path, self.to_json())?;
        Ok(path)
    }

    /// Writes the calls by [`dump`](Self::dump) into the recorder's folder, if it has one: the
    /// first time, and never again.
    pub fn dump_once(&mut self) {
        if let (None, Some(folder)) = (&self.dumped, &self.folder) {
            self.dumped = Some(self.dump(folder).map_err(|error| error.to_string()));
        }
    }

    /// The file that was written when a call failed, or why it could not be written. `None` before
    /// a failure, and without a folder.
    pub fn dumped(&self) -> Option<&Result<PathBuf, String>> {
        self.dumped.as_ref()
    }

    /// [`dumped`](Self::dumped) in words, for people who read why a process ends.
    pub fn place(&self) -> String {
        match &self.dumped {
            None => "no folder was given for the flight recorder".to_owned(),
            Some(Ok(path)) => format!("the flight recorder is {}", path.display()),
            Some(Err(error)) => format!("the flight recorder could not be written: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallContext, Operation};

    fn print(sequence: u64) -> Fingerprint {
        let root = sequence as usize;
        Fingerprint {
            sequence,
            operation: match sequence % 3 {
                0 if sequence > 5 => Operation::AllReduce(ReduceOp::Tree(Divisor::of(12.0))),
                0 => Operation::AllReduce(ReduceOp::Max),
                1 => Operation::Broadcast { root },
                _ => Operation::Receive { from: root },
            },
            dtype: DType::BF16,
            numel: 10 * sequence,
            counts_hash: 3,
            context: CallContext {
                plan_hash: sequence << 40,
                bucket: sequence.is_multiple_of(2).then_some(sequence as u32),
            },
        }
    }

    #[test]
    fn the_last_calls_are_kept_whole_with_the_failures_among_them() {
        let error = |calls| CollectiveError::Left { rank: 2, calls };
        let mut recorder = FlightRecorder::new(1, 4, 3, Instant::now());
        assert_eq!(recorder.calls().len(), 0);
        for sequence in 1..=8 {
            recorder.begin(&print(sequence));
            let running = recorder.calls().last().unwrap();
            assert_eq!((running.state, running.ended_ns), (CallState::Running, 0));
            if sequence >= 6 {
                recorder.waited(sequence as usize - 6, 100 * sequence);
            }
            match sequence {
                1 | 5 | 7 => recorder.end(Err(&error(sequence))),
                8 => {}
                _ => recorder.end(Ok(())),
            }
            assert!(recorder.calls().len() <= 3);
        }
        assert_eq!(recorder.calls_begun(), 8);
        let calls: Vec<_> = recorder.calls().collect();
        for (call, sequence) in calls.iter().zip(6u64..) {
            let made = print(sequence);
            assert_eq!(call.sequence, sequence);
            assert_eq!(call.operation, made.operation.name());
            assert_eq!(call.reduce, made.operation.reduce_op());
            assert_eq!(call.root, made.operation.root());
            assert_eq!((call.dtype, call.len_bytes), (DType::BF16, 20 * sequence));
            assert_eq!(call.bucket, made.context.bucket);
            assert_eq!(call.plan_hash, made.context.plan_hash);
            assert_eq!(call.straggler, Some(sequence as usize - 6));
            assert_eq!(call.waited_ns, 100 * sequence);
        }
        assert_eq!(calls[0].state, CallState::Done);
        assert_eq!(calls[1].state, CallState::Failed(error(7).to_string()));
        assert_eq!(calls[2].state, CallState::Running);
        assert!(calls[0].started_ns <= calls[0].ended_ns && calls[0].ended_ns > 0);
        assert!(calls[1].ended_ns <= calls[2].started_ns);
        // What was forgotten is forgotten with its reason.
        assert_eq!(recorder.failures.len(), 1);
        // An outcome told twice is the last one told.
        recorder.end(Err(&error(1)));
        recorder.end(Err(&error(2)));
        let last = recorder.calls().last().unwrap();
        assert_eq!(last.state, CallState::Failed(error(2).to_string()));
        assert!(recorder.to_json().contains("\"calls_begun\": 8"));
    }
}
