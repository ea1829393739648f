//! What a rank writes down about its calls: in its flight recorder, and where other threads find it
//! who end the process.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use fusestep_collective::{CollectiveError, Fingerprint, FlightRecorder};

use crate::group::Group;
use crate::watch;

/// The flight recorder of a rank.
#[derive(Debug)]
pub(crate) struct Log {
    recorder: FlightRecorder,
    /// Whether other groups have written theirs because of this one.
    has_told: bool,
}

impl Log {
    pub(crate) fn new(group: &Group) -> Self {
        let calls = group.options.recorded_calls;
        let world_size = group.world_size();
        let recorder = FlightRecorder::new(group.rank, world_size, calls, group.begun);
        let folder = group.options.dump_folder.clone();
        Self { recorder: recorder.dumped_into(folder), has_told: false }
    }

    pub(crate) fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    /// Writes down that a call begins; when, in nanoseconds of the group's life.
    pub(crate) fn begin(&mut self, group: &Group, print: &Fingerprint) -> u64 {
        let begun_ns = self.recorder.begin(print);
        if let Some(mut mirror) = mirror(group) {
            mirror.begin(print);
        }
        begun_ns
    }

    /// Writes down who came last.
    pub(crate) fn waited(&mut self, group: &Group, rank: usize, waited: Duration) {
        let waited_ns = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        self.recorder.waited(rank, waited_ns);
        if let Some(mut mirror) = mirror(group) {
            mirror.waited(rank, waited_ns);
        }
    }

    /// Writes an outcome down; on disk too, if it is an error.
    pub(crate) fn end(&mut self, group: &Group, outcome: Result<(), &CollectiveError>) {
        if let Some(mut mirror) = mirror(group) {
            mirror.end(outcome);
        }
        self.recorder.end(outcome);
        if outcome.is_err() {
            self.dump(group);
        }
    }

    /// Writes it to disk, unless that was done.
    pub(crate) fn dump(&mut self, group: &Group) {
        self.recorder.dump_once();
        if !std::mem::replace(&mut self.has_told, true) {
            // A communication stream that finds a rank missing says little about why: what the rank
            // did last may stand in another group's.
            watch::dump_others(group);
        }
    }
}

/// The recorder that other threads can write to disk; none if there is no folder for it, which
/// saves locks and looks at the clock.
fn mirror(group: &Group) -> Option<MutexGuard<'_, FlightRecorder>> {
    group.options.dump_folder.as_ref()?;
    let locked = group.mirror.lock();
    Some(locked.unwrap_or_else(PoisonError::into_inner))
}
