//! The communicator: what it keeps between calls, and the order of steps of each call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Aborter, Blocks, Call, CallContext, CallShape, CollectiveError, Communicator, Fingerprint,
    FlightRecorder, Membership, Movement, Operation, RankMemory, ReduceUpdate,
};
use fusestep_collective_processes::ProcessCommunicator;

use crate::agreed::Agreed;
use crate::engine::{Engine, Kind, Request};
use crate::group::{Founding, Group};
use crate::log::Log;
use crate::machine::{self, OnMachine};
use crate::meeting::{Meeting, Party};
use crate::native::Native;
use crate::wire::Header;
use crate::{Compare, MpiError, MpiOptions, Reduction, algorithms, split, watch};

/// Least time between two looks for what the others say about the group's end where calls are not
/// compared: a look takes 0.3 µs, and calls may take ten times that.
const POLL_NS: u64 = 100_000;

/// One rank of an MPI job, or of a subgroup of it.
///
/// Ranks are processes that `mpirun` has started, and of one program. A group that ends in an error
/// ends for good, on all ranks alike; the process goes on, leaves MPI when its last communicator is
/// dropped, and ends the job if others do not leave, too. Only if a rank stops while data moves is
/// there no way back: the job is ended, after the reason was printed and the flight recorder
/// written.
///
/// # Cost
/// One exchange of 72 bytes between all ranks and then the messages that [`docs/collectives.md`]
/// lists. Calls poll: they need a core for as long as they last, given away after 30 µs if somebody
/// else wants it.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-mpi
#[derive(Debug)]
pub struct MpiCommunicator {
    pub(crate) group: Arc<Group>,
    sequence: u64,
    context: CallContext,
    log: Log,
    meeting: Meeting,
    /// Messages of data under way.
    pub(crate) pending: Vec<(Request, usize)>,
    /// What others contribute to the part that this rank reduces, and the result. Words, so that
    /// elements are aligned.
    pub(crate) incoming: Vec<u64>,
    pub(crate) reduced: Vec<u64>,
    /// Transfers made, by sender and receiver.
    transfers: HashMap<(usize, usize), u64>,
    agreed: Agreed,
    pub(crate) native: Option<Native>,
    /// Carries every call instead, where all ranks run on one machine.
    shared: Option<OnMachine<ProcessCommunicator>>,
    /// When the call under way began, or all had come to it, in nanoseconds of the group's life.
    pub(crate) begun_ns: u64,
    /// When what the others say about the group's end was last looked for.
    polled_ns: u64,
}

impl MpiCommunicator {
    /// All processes of the job; the first thing that a program does with MPI. A process that no
    /// launcher has started is a world of one.
    ///
    /// # Errors
    /// [`MpiError::AlreadyStarted`], [`MpiError::ThreadLevel`], [`MpiError::Differs`], or a call of
    /// MPI that failed. Without a launcher's help that can work, MPI itself ends the process.
    pub fn world(options: &MpiOptions) -> Result<Self, MpiError> {
        let engine = Arc::new(Engine::start(options)?);
        machine::compare_options(&engine, options)?;
        let native = match options.reduction {
            Reduction::Reproducible => None,
            Reduction::Engine => Some(Native::world(&engine)?),
        };
        let shared = match options.reduction {
            Reduction::Reproducible if options.share_memory => machine::share(&engine, options)?,
            _ => None,
        };
        let mut options = options.clone();
        if shared.is_some() {
            // The calls, and so the recorder, are those of shared memory.
            options.dump_folder = None;
        }
        let founding = Founding {
            members: (0..engine.world_size).collect(),
            rank: engine.rank,
            tag: 0,
            options,
        };
        let mut world = Self::new(Group::new(engine, founding, None), native);
        world.shared = shared;
        Ok(world)
    }

    /// How long this rank waits for others from the next call on; groups made by a split take it
    /// over.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.group.set_timeout(timeout);
        if let Some(shared) = &mut self.shared {
            shared.inner.set_timeout(timeout);
        }
    }

    /// What the MPI calls itself.
    pub fn library_version(&self) -> &str {
        self.group.engine.version.trim_end_matches('\0')
    }

    fn new(group: Arc<Group>, native: Option<Native>) -> Self {
        watch::register(&group);
        if native.is_some() {
            watch::register_timed(&group);
        }
        Self {
            sequence: 0,
            context: CallContext::default(),
            log: Log::new(&group),
            meeting: Meeting::default(),
            pending: Vec::new(),
            incoming: Vec::new(),
            reduced: Vec::new(),
            transfers: HashMap::new(),
            agreed: Agreed::default(),
            native,
            shared: None,
            begun_ns: 0,
            polled_ns: 0,
            group,
        }
    }

    fn begin(&mut self, print: &Fingerprint) {
        self.begun_ns = self.log.begin(&self.group, print);
    }

    /// Writes an outcome down; an error becomes that of all ranks.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| match error {
            CollectiveError::Left { .. } => error,
            error => self.group.settle(error),
        });
        self.log.end(&self.group, outcome.as_ref().map(|_| ()));
        outcome
    }

    /// What ends a call before it begins.
    fn ended(&self, party: Party) -> Result<(), CollectiveError> {
        if let Some(error) = self.group.settled() {
            return Err(error);
        }
        if self.group.is_ending() {
            return Err(self.group.settle_as_told());
        }
        self.group.left(party).map_or(Ok(()), Err)
    }

    /// Exchanges headers and compares fingerprints.
    pub(crate) fn meet(
        &mut self,
        party: Party,
        header: Header,
    ) -> Result<&[Header], CollectiveError> {
        self.group.poll();
        self.ended(party)?;
        let deadline = Instant::now() + self.group.timeout();
        if let Some(last) = self.meeting.meet(&self.group, party, header, deadline)? {
            self.log.waited(&self.group, last.rank, last.waited);
        }
        let headers = self.meeting.headers();
        Fingerprint::compare(headers.len(), |rank| &headers[rank].fingerprint)?;
        Ok(self.meeting.headers())
    }

    /// Any call that all ranks make and that moves data.
    fn collective(&mut self, call: Call<'_>, blocks: Blocks<'_>) -> Result<(), CollectiveError> {
        let print = call.shape().fingerprint(blocks.numel, self.sequence, self.context);
        self.begin(&print);
        let first = match self.group.options.compare {
            // A barrier is its exchange of headers.
            _ if call.operation == Operation::Barrier => true,
            Compare::EveryCall => true,
            Compare::FirstOfEach => self.agreed.insert(print),
        };
        if first {
            self.meet(Party::All(self.sequence), Header::of(print))?;
            self.begun_ns = self.group.now_ns();
        } else {
            self.enter()?
        }
        algorithms::move_data(self, call, blocks, &print)
    }

    /// Begins to move the data of a call that is not compared.
    fn enter(&mut self) -> Result<(), CollectiveError> {
        // What is said after the look goes unheard until the deadline in any case.
        if self.begun_ns.saturating_sub(self.polled_ns) >= POLL_NS {
            self.group.poll();
            self.polled_ns = self.begun_ns;
        }
        self.ended(Party::All(self.sequence))?;
        self.group.entered.store(self.sequence, Ordering::Release);
        Ok(())
    }

    /// Makes a call like the last one that all ranks have agreed on.
    fn again(&mut self, call: Call<'_>, last: Fingerprint) -> Result<(), CollectiveError> {
        self.sequence += 1;
        let print = Fingerprint { sequence: self.sequence, ..last };
        self.begin(&print);
        self.enter()?;
        let blocks = Blocks {
            numel: last.numel as usize,
            world_size: self.group.world_size(),
            counts: None,
        };
        algorithms::move_data(self, call, blocks, &print)
    }

    /// A send or a receive, from `pair.0` to `pair.1`.
    fn transfer(
        &mut self,
        call: Call<'_>,
        numel: usize,
        pair: (usize, usize),
    ) -> Result<(), CollectiveError> {
        let made = self.transfers.entry(pair).or_insert(0);
        *made += 1;
        let mut print = call.shape().fingerprint(numel, *made, self.context);
        self.begin(&print);
        print.operation = Operation::Send { to: pair.1 };
        let own = self.group.rank;
        let peer = if own == pair.0 { pair.1 } else { pair.0 };
        let met = self.meet(Party::Pair(peer), Header::of(print));
        met.map_err(|error| error.with_ranks(&[own.min(peer), own.max(peer)]))?;
        let whole = 0..numel * call.dtype.len_bytes();
        let movement = Movement { operation: call.operation, blocks: std::slice::from_ref(&whole) };
        algorithms::carry_out(self, &movement, call.buffers, (Kind::Transfer, &print));
        Ok(())
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        if let Some(shared) = &mut self.shared {
            return shared.execute(call);
        }
        if let Some(last) = self.agreed.like(&call, self.context) {
            let outcome = self.again(call, last);
            return self.end(outcome);
        }
        let blocks = call.blocks(self.group.rank, self.group.world_size()).map_err(|error| {
            let error = self.group.settle(error);
            self.log.dump(&self.group);
            error
        })?;
        let outcome = match call.operation.pair(self.group.rank) {
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
        if let Some(shared) = &mut self.shared {
            return shared.split(membership);
        }
        self.sequence += 1;
        let print = CallShape::SPLIT.fingerprint(0, self.sequence, self.context);
        self.begin(&print);
        let outcome = split::join(self, print, membership);
        let Some(subgroup) = self.end(outcome)? else {
            return Ok(None);
        };
        let (group, native) = subgroup.found(self)?;
        Ok(Some(Box::new(Self::new(group, native))))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
        if let Some(shared) = &mut self.shared {
            shared.set_context(context);
        }
    }

    fn aborter(&self) -> Aborter {
        if let Some(shared) = &self.shared {
            return shared.aborter();
        }
        Aborter::of(self.group.rank, &self.group, Group::announce, Group::failure)
    }

    fn recorder(&self) -> &FlightRecorder {
        match &self.shared {
            Some(shared) => shared.recorder(),
            None => self.log.recorder(),
        }
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        match &mut self.shared {
            Some(shared) => shared.allocate(len_bytes),
            None => HostMemory::zeroed(len_bytes)
                .map_err(|error| CollectiveError::refused(self.group.rank, "allocate", error)),
        }
    }

    fn shares_memory(&self) -> bool {
        self.shared.is_some()
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        if let Some(shared) = &mut self.shared {
            return shared.reduce_update(call, work);
        }
        Err(CollectiveError::refused(
            self.group.rank,
            Operation::ReduceUpdate.name(),
            "expected ranks that share the memory of one machine, found ranks that send messages; \
             reduce first and update then",
        ))
    }

    fn failure(&self) -> Option<CollectiveError> {
        if let Some(shared) = &self.shared {
            return shared.failure();
        }
        self.group.failure()
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        if self.shared.is_some() {
            return;
        }
        let (rank, calls) = (self.group.rank, self.log.recorder().calls_begun());
        if std::thread::panicking() {
            self.log.dump(&self.group);
            self.group.announce(CollectiveError::Panicked { rank, calls });
        } else {
            self.group.leave(calls);
        }
    }
}
