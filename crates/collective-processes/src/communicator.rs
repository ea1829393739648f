//! The communicator: what it keeps between calls, and how calls begin and end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Aborter, Blocks, Call, CallContext, CallShape, CollectiveError, Communicator, Fingerprint,
    FlightRecorder, MAX_TIMEOUT, Membership, Operation, RankMemory, ReduceUpdate,
};

use crate::card::Card;
use crate::group::{Founding, Group};
use crate::heap::Arena;
use crate::round::{Broken, Place};
use crate::session::SessionPlan;
use crate::task::Task;
use crate::{ProcessError, ProcessOptions, Rendezvous, rendezvous, split, starter};

/// Bytes of the place through which memory of a process's own comes to the others.
pub(crate) const STAGE_BYTES: usize = 512 << 10;

/// One rank of a group of processes on one machine.
///
/// Giving it up while others still use theirs ends their calls with [`CollectiveError::Left`], or
/// [`CollectiveError::Panicked`] if its thread panicked. A process that dies is named by
/// [`CollectiveError::Died`] some milliseconds later.
///
/// # Cost
/// Two waits for all ranks per call. Memory that [`allocate`](Communicator::allocate) gave is used
/// where it lies; other memory goes through 512 KiB of shared memory, stretch by stretch, with two
/// more copies and two waits for each stretch.
#[derive(Debug)]
pub struct ProcessCommunicator {
    pub(crate) group: Arc<Group>,
    pub(crate) options: ProcessOptions,
    pub(crate) place: Place,
    sequence: u64,
    context: CallContext,
    /// Places for transfers, by sender and receiver, and how many there were.
    pairs: HashMap<(usize, usize), (Place, u64)>,
    /// Where others find what lies elsewhere; made by the first call that needs it.
    pub(crate) stage: Option<Arena>,
    pub(crate) recorder: FlightRecorder,
}

impl ProcessCommunicator {
    /// All processes that a launcher has started: `fusestep launch -n N -- PROGRAM`, or torchrun.
    /// From then on this one ends, by SIGTERM, when `fusestep launch` has gone.
    ///
    /// # Errors
    /// [`ProcessError`] with what was expected and found in the environment, or the ranks that did
    /// not come.
    pub fn world(options: &ProcessOptions) -> Result<Self, ProcessError> {
        starter::follow();
        Self::join(&Rendezvous::from_environment()?, options)
    }

    /// The processes that pass the same session and number of ranks, each with its own rank.
    ///
    /// # Errors
    /// As [`world`](Self::world).
    pub fn join(place: &Rendezvous, options: &ProcessOptions) -> Result<Self, ProcessError> {
        let session = rendezvous::join(place, options.timeout.min(MAX_TIMEOUT))?;
        let founding = Founding {
            block: SessionPlan::new(place.world_size).world(),
            members: (0..place.world_size).collect(),
            rank: session.rank,
            memory: None,
            parent: None,
        };
        Ok(Self::new(Group::new(Arc::new(session), founding), options.clone()))
    }

    fn new(group: Arc<Group>, options: ProcessOptions) -> Self {
        let options = ProcessOptions { timeout: options.timeout.min(MAX_TIMEOUT), ..options };
        let (rank, ranks) = (group.rank, group.world_size());
        let recorder = FlightRecorder::new(rank, ranks, options.recorded_calls, group.begun);
        Self {
            place: group.place(),
            recorder: recorder.dumped_into(options.dump_folder.clone()),
            options,
            sequence: 0,
            context: CallContext::default(),
            pairs: HashMap::new(),
            stage: None,
            group,
        }
    }

    /// How long this rank waits for others from the next call on; groups made by a split take it
    /// over.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.options.timeout = timeout.min(MAX_TIMEOUT);
    }

    /// What a call that fails leaves behind: the group closed, unless a rank has only left.
    fn fail(&self, error: CollectiveError) -> CollectiveError {
        match error {
            CollectiveError::Left { .. } => error,
            error => self.group.close(error),
        }
    }

    /// Writes an outcome down.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| self.fail(error));
        self.recorder.end(outcome.as_ref().map(|_| ()));
        outcome
    }

    /// A call that this rank cannot make.
    fn refuse<T>(&mut self, error: CollectiveError) -> Result<T, CollectiveError> {
        let error = self.fail(error);
        self.recorder.dump_once();
        Err(error)
    }

    /// Writes down that a call begins.
    fn begin(&mut self, print: Fingerprint) -> Task {
        let arrived_ns = self.recorder.begin(&print);
        let own = self.group.member(self.group.rank);
        let calls = self.recorder.calls_begun();
        own.calls.store(calls, Ordering::Relaxed);
        let begun = self.group.begun + Duration::from_nanos(arrived_ns);
        Task {
            card: Card::new(print, self.group.begun_ns + arrived_ns),
            named: print,
            deadline: begun + self.options.timeout,
            timeout: self.options.timeout,
        }
    }

    /// The place through which memory of this process's own comes to the others.
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
                 in the temporary folder; make them larger (docker: --shm-size), or set TMPDIR to \
                 a folder with more room"
            );
            self.refused("allocate", reason)
        })
    }

    /// The error of a call that this rank cannot make.
    pub(crate) fn refused(&self, operation: &'static str, reason: String) -> CollectiveError {
        CollectiveError::refused(self.group.rank, operation, reason)
    }

    /// What a round that did not end well means for its caller. `stage` is what the others may
    /// still use; `is_exposed` says that they may use the caller's own memory, too.
    pub(crate) fn settle(
        &mut self,
        broken: Broken,
        stage: &mut Option<Arena>,
        is_exposed: bool,
    ) -> CollectiveError {
        match broken {
            Broken::Ended(error) => error,
            Broken::InUse(error) if is_exposed => self.die(error),
            Broken::InUse(error) => {
                // Never given out again: a rank that wakes up may write there.
                std::mem::forget(stage.take());
                error
            }
        }
    }

    /// Ends the process because memory that another one is using cannot be taken back: says why,
    /// and leaves the recorder on disk.
    fn die(&mut self, error: CollectiveError) -> ! {
        let error = self.fail(error);
        self.recorder.end(Err(&error));
        let place = self.recorder.place();
        // Nobody is left who could say it by the world's ranks for a group that was split off.
        let (rank, error) = self.group.in_session(error);
        starter::say(&format!(
            "rank {rank}: {error}; data was under way, so the process ends; {place}"
        ));
        std::process::exit(1)
    }

    /// Any call that all ranks of the group make.
    fn collective(&mut self, call: Call<'_>, blocks: Blocks<'_>) -> Result<(), CollectiveError> {
        let print = call.shape().fingerprint(blocks.numel, self.sequence, self.context);
        let mut task = self.begin(print);
        match call.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => self.reduction(&mut task, call, blocks, op),
            _ => self.movement(&mut task, call, blocks),
        }
    }

    /// A send or a receive, from `pair.0` to `pair.1`.
    fn transfer(
        &mut self,
        call: Call<'_>,
        numel: usize,
        pair: (usize, usize),
    ) -> Result<(), CollectiveError> {
        let known = self.pairs.remove(&pair);
        let (mut place, made) = known.unwrap_or_else(|| (self.group.pair_place(pair), 0));
        let mut print = call.shape().fingerprint(numel, made + 1, self.context);
        let mut task = self.begin(print);
        print.operation = Operation::Send { to: pair.1 };
        task.card.print = print;
        let peer = [pair.1, pair.0][place.party];
        self.group.set_transfer(Some(peer));
        let outcome = self.pass_on(&mut task, call.buffers, &mut place);
        // As between threads: until the group is closed others have to see that this rank waited.
        if !matches!(outcome, Err(CollectiveError::Late { .. })) {
            self.group.set_transfer(None);
        }
        self.pairs.insert(pair, (place, made + 1));
        outcome
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        let rank = self.group.rank;
        let blocks = call.blocks(rank, self.group.world_size());
        let blocks = blocks.or_else(|error| self.refuse(error))?;
        let outcome = match call.operation.pair(rank) {
            Some(pair) => self.transfer(call, blocks.numel, pair),
            None => {
                self.sequence += 1;
                self.collective(call, blocks)
            }
        };
        self.end(outcome)
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        self.sequence += 1;
        let print = CallShape::SPLIT.fingerprint(0, self.sequence, self.context);
        let task = self.begin(print);
        let outcome = split::form(self, task, membership);
        let Some(founding) = self.end(outcome)? else {
            return Ok(None);
        };
        let colour = membership.map_or(0, |own| own.colour);
        let name = format!("group-{}-{colour}", self.sequence);
        let mut options = self.options.clone();
        options.dump_folder = options.dump_folder.map(|folder| folder.join(name));
        let group = Group::new(Arc::clone(&self.group.session), founding);
        Ok(Some(Box::new(Self::new(group, options))))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let close = |group: &Group, error| drop(group.close(error));
        Aborter::of(self.group.rank, &self.group, close, Group::failure)
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        let arena = self.arena(len_bytes)?;
        let given = HostMemory::given(Box::new(arena));
        given.map_err(|error| self.refused("allocate", error.to_string()))
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let blocks = call.blocks(self.group.rank, self.group.world_size());
        let blocks = blocks.or_else(|error| self.refuse(error))?;
        self.sequence += 1;
        let print = call.fingerprint(blocks.numel, self.sequence, self.context);
        let task = self.begin(print);
        let outcome = self.update_everywhere(task, call, blocks, work);
        self.end(outcome)
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.group.failure()
    }
}

impl Drop for ProcessCommunicator {
    fn drop(&mut self) {
        let (rank, calls) = (self.group.rank, self.recorder.calls_begun());
        if std::thread::panicking() {
            self.recorder.dump_once();
            self.group.close(CollectiveError::Panicked { rank, calls });
        } else {
            self.group.leave(calls);
        }
    }
}
