//! The engine: one rank's side of a group, and what its calls keep.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Aborter, Begun, Blocks, Call, CollectiveError, Engine, FlightRecorder, Membership, OnShared,
    Operation, Pair,
};

use crate::group::Group;
use crate::heap::Arena;
use crate::place::Place;
use crate::round::Broken;
use crate::task::Task;
use crate::{ProcessOptions, last_calls, starter};

/// Bytes of the stage, through which other ranks see memory that lies outside of the segment.
pub(crate) const STAGE_BYTES: usize = 512 << 10;

/// One rank's engine in a group of processes.
#[derive(Debug)]
pub(crate) struct Processes {
    pub(crate) group: Arc<Group>,
    pub(crate) options: ProcessOptions,
    pub(crate) place: Place,
    /// Places for transfers.
    pairs: HashMap<Pair, Place>,
    /// The stage, for memory that lies outside of the segment; made by the first call that needs
    /// it.
    pub(crate) stage: Option<Arena>,
    /// The copy of the recorder that a signal's thread can write. `None` without a folder, which
    /// saves locks and looks at the clock.
    mirror: Option<Arc<Mutex<FlightRecorder>>>,
}

impl Processes {
    pub(crate) fn new(group: Arc<Group>, options: ProcessOptions) -> Self {
        let mirror = options.dump_folder.is_some().then(|| {
            let Group { rank, begun, .. } = *group;
            let calls = options.recorded_calls;
            let recorder = FlightRecorder::new(rank, group.world_size(), calls, begun);
            let recorder = Arc::new(Mutex::new(recorder));
            last_calls::written_at_end(&recorder);
            recorder
        });
        let place = group.place();
        Self { place, options, pairs: HashMap::new(), stage: None, mirror, group }
    }

    /// Closes the group because of a call's error, unless a rank has only left; returns the error
    /// that holds.
    fn fail(&self, error: CollectiveError) -> CollectiveError {
        match error {
            CollectiveError::Left { .. } => error,
            error => self.group.close(error),
        }
    }

    /// The stage, through which other ranks see memory that lies outside of the segment.
    pub(crate) fn stage(&mut self) -> Result<Arena, CollectiveError> {
        match self.stage.take() {
            Some(stage) => Ok(stage),
            None => self.arena(STAGE_BYTES),
        }
    }

    pub(crate) fn arena(&self, len_bytes: usize) -> Result<Arena, CollectiveError> {
        let made = self.group.session.heap.allocate(len_bytes);
        made.map_err(|error| {
            let reason = format!(
                "expected {len_bytes} bytes that processes share, found {error} in /dev/shm and \
                 in the temporary folder; make them larger (docker: --shm-size), set TMPDIR to a \
                 folder with more room, or raise the limit on address space (ulimit -v) if there \
                 is one"
            );
            self.refused("allocate", reason)
        })
    }

    /// The error of a call that this rank cannot make.
    pub(crate) fn refused(&self, operation: &'static str, reason: String) -> CollectiveError {
        CollectiveError::refused(self.group.rank, operation, reason)
    }

    /// The error for the caller of a round that did not end well. Other ranks may still use
    /// `stage`, and the caller's own memory, too, if `is_exposed`.
    pub(crate) fn settle(
        &self,
        begun: &mut Begun<'_>,
        broken: Broken,
        stage: &mut Option<Arena>,
        is_exposed: bool,
    ) -> CollectiveError {
        match broken {
            Broken::Ended(error) => error,
            Broken::InUse(error) if is_exposed => self.die(begun, error),
            Broken::InUse(error) => {
                // The stage is never given out again: a rank that wakes up may write there.
                std::mem::forget(stage.take());
                error
            }
        }
    }

    /// Ends the process, because memory that another process is using cannot be taken back. Says
    /// why, and leaves the recorder on disk.
    fn die(&self, begun: &mut Begun<'_>, error: CollectiveError) -> ! {
        let error = self.fail(error);
        let place = begun.end_with_process(&error);
        // After this process nobody can name the ranks of a subgroup by their numbers in the world.
        let (rank, error) = self.group.in_session(error);
        starter::say(&format!(
            "rank {rank}: {error}; data was under way, so the process ends; {place}"
        ));
        std::process::exit(1)
    }
}

impl Engine for Processes {
    fn place(&self) -> fusestep_collective::Place {
        let Group { rank, begun, .. } = *self.group;
        fusestep_collective::Place { rank, world_size: self.group.world_size(), begun }
    }

    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        match call.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => self.reduction(begun, call, blocks, op),
            _ => self.movement(begun, call, blocks),
        }
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let known = self.pairs.remove(&pair);
        let mut place = known.unwrap_or_else(|| self.group.pair_place(pair));
        let mut task = Task::new(begun, &self.group);
        self.group.set_transfer(Some(pair.peer(self.group.rank)));
        let outcome = self.pass_on(begun, &mut task, call.buffers, &mut place);
        // As between threads: until the group is closed, other ranks must see that this rank
        // waited.
        if !matches!(outcome, Err(CollectiveError::Late { .. })) {
            self.group.set_transfer(None);
        }
        self.pairs.insert(pair, place);
        outcome
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        let founding = self.form(begun, membership)?;
        let group = founding.map(|founding| Group::new(Arc::clone(&self.group.session), founding));
        Ok(group.map(|group| Self::new(group, self.options.clone())))
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        self.fail(error)
    }

    fn leave(&mut self, last: CollectiveError) {
        match last {
            CollectiveError::Left { calls, .. } => self.group.leave(calls),
            last => drop(self.group.close(last)),
        }
    }

    fn aborter(&self) -> Aborter {
        let close = |group: &Group, error| drop(group.close(error));
        Aborter::of(self.group.rank, &self.group, close, Group::failure)
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.group.failure()
    }

    fn mirror(&self) -> Option<Arc<Mutex<FlightRecorder>>> {
        self.mirror.clone()
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        let arena = self.arena(len_bytes)?;
        let given = HostMemory::given(Box::new(arena));
        given.map_err(|error| self.refused("allocate", error.to_string()))
    }

    fn on_shared(&mut self) -> Option<&mut dyn OnShared> {
        Some(self)
    }
}
