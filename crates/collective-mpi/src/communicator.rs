//! The communicator: what it keeps between calls, and the order of steps of each call.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fusestep_coalesce::HostMemory;
use fusestep_collective::{
    Aborter, Blocks, Buffers, Call, CallContext, CollectiveError, Communicator, Fingerprint,
    FlightRecorder, Membership, Operation, RankMemory, ReduceUpdate,
};
use fusestep_collective_processes::ProcessCommunicator;
use fusestep_tensor::DType;

use crate::agreed::Agreed;
use crate::engine::{Engine, Request};
use crate::group::{Founding, Group};
use crate::machine::{self, OnMachine};
use crate::meeting::{Meeting, Party};
use crate::native::Native;
use crate::wire::Header;
use crate::{Compare, MpiError, MpiOptions, Reduction, algorithms, transfer, watch};

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
/// One exchange of 88 bytes between all ranks and then the messages that [`docs/collectives.md`]
/// lists. Calls poll: they need a core for as long as they last, given away after 30 µs if somebody
/// else wants it.
///
/// [`docs/collectives.md`]: https://docs.rs/fusestep-collective-mpi
#[derive(Debug)]
pub struct MpiCommunicator {
    pub(crate) group: Arc<Group>,
    sequence: u64,
    context: CallContext,
    recorder: FlightRecorder,
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
    dumped: Option<Result<PathBuf, String>>,
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

    /// Where the flight recorder was written, or why it could not be; `None` while all is well or
    /// without a folder.
    pub fn dumped(&self) -> Option<&Result<PathBuf, String>> {
        match &self.shared {
            Some(shared) => shared.inner.dumped(),
            None => self.dumped.as_ref(),
        }
    }

    fn new(group: Arc<Group>, native: Option<Native>) -> Self {
        watch::register(&group);
        if native.is_some() {
            watch::register_timed(&group);
        }
        let options = &group.options;
        let recorder = FlightRecorder::new(
            group.rank,
            group.world_size(),
            options.recorded_calls,
            group.begun,
        );
        Self {
            sequence: 0,
            context: CallContext::default(),
            recorder,
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
            dumped: None,
            group,
        }
    }

    /// The recorder that other threads can write to disk; none if there is no folder for it, which
    /// saves locks and looks at the clock.
    fn mirror(&self) -> Option<MutexGuard<'_, FlightRecorder>> {
        self.group.options.dump_folder.as_ref()?;
        let locked = self.group.mirror.lock();
        Some(locked.unwrap_or_else(PoisonError::into_inner))
    }

    fn begin(&mut self, print: &Fingerprint) {
        self.begun_ns = self.recorder.begin(print);
        if let Some(mut mirror) = self.mirror() {
            mirror.begin(print);
        }
    }

    /// Writes an outcome down; an error becomes that of all ranks.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| match error {
            CollectiveError::Left { .. } => error,
            error => self.group.settle(error),
        });
        let said = outcome.as_ref().map(|_| ());
        if let Some(mut mirror) = self.mirror() {
            mirror.end(said);
        }
        self.recorder.end(said);
        if outcome.is_err() {
            self.dump();
        }
        outcome
    }

    fn dump(&mut self) {
        if self.dumped.is_none() {
            self.dumped = self.group.dump();
            // A communication stream that finds a rank missing says little about why: what the rank
            // did last may stand in another group's.
            watch::dump_others(&self.group);
        }
    }

    /// What ends a call before it begins.
    fn ended(&self, party: Party) -> Result<(), CollectiveError> {
        if let Some(error) = self.group.settled() {
            return Err(error);
        }
        if self.group.is_ending() {
            return Err(self.group.settle_as_told());
        }
        let left = match party {
            Party::All(call) => self.group.left_before(call),
            Party::Pair(peer) => self.group.left_rank(peer),
        };
        left.map_or(Ok(()), Err)
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
            let waited_ns = u64::try_from(last.waited.as_nanos()).unwrap_or(u64::MAX);
            self.recorder.waited(last.rank, waited_ns);
            if let Some(mut mirror) = self.mirror() {
                mirror.waited(last.rank, waited_ns);
            }
        }
        let headers = self.meeting.headers();
        Fingerprint::compare(headers.len(), |rank| &headers[rank].fingerprint)?;
        Ok(self.meeting.headers())
    }

    /// Any call that all ranks make and that moves data.
    fn collective(&mut self, call: Call<'_>, blocks: Blocks<'_>) -> Result<(), CollectiveError> {
        let print = Fingerprint::new(&call, blocks.numel, self.sequence, self.context);
        self.begin(&print);
        let first = match self.group.options.compare {
            // A barrier is its exchange of headers.
            _ if call.operation == Operation::Barrier => true,
            Compare::EveryCall => true,
            Compare::FirstOfEach => self.agreed.insert(print),
        };
        if first {
            self.meet(Party::All(self.sequence), header(print))?;
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
        let print = Fingerprint {
            sequence: self.sequence,
            ..last
        };
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
        let mut print = Fingerprint::new(&call, numel, *made, self.context);
        self.begin(&print);
        print.operation = Operation::Send { to: pair.1 };
        transfer::between(self, call, print, pair)
    }

    fn join(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<(Founding, u32)>, CollectiveError> {
        let call = Call {
            operation: Operation::Split,
            dtype: DType::U8,
            counts: None,
            buffers: Buffers::InPlace(&mut []),
        };
        let print = Fingerprint::new(&call, 0, self.sequence, self.context);
        self.begin(&print);
        let own = Header {
            membership,
            proposal: self.group.engine.reserve_group(),
            ..header(print)
        };
        let rank = self.group.rank;
        let headers = self.meet(Party::All(self.sequence), own)?;
        let Some(own) = membership else {
            return Ok(None);
        };
        let colour = |other: usize| headers[other].membership.map(|m| m.colour);
        let same = |other: &usize| colour(*other) == Some(own.colour);
        let mut ranks: Vec<usize> = (0..headers.len()).filter(same).collect();
        ranks.sort_by_key(|&other| (headers[other].membership.map(|m| m.key), other));
        let leader = ranks.iter().copied().min().unwrap_or(rank);
        let proposal = headers[leader].proposal;
        let place = ranks.iter().position(|&other| other == rank).unwrap_or(0);
        let group = &self.group;
        let leader = group.members[leader];
        let tag = group.engine.group_tag(leader, proposal);
        let tag = tag.ok_or_else(|| CollectiveError::Refused {
            rank,
            operation: "split",
            reason: format!(
                "expected tags for one more group, found none left after {proposal} groups led \
                 by process {leader}; split less often and keep the groups"
            ),
        })?;
        let mut options = group.options.clone();
        options.timeout = group.timeout();
        options.dump_folder = options
            .dump_folder
            .map(|folder| folder.join(format!("group-{tag}")));
        let founding = Founding {
            members: ranks.iter().map(|&other| group.members[other]).collect(),
            rank: place,
            tag,
            options,
        };
        Ok(Some((founding, proposal)))
    }
}

/// A header that joins no group.
pub(crate) fn header(fingerprint: Fingerprint) -> Header {
    Header {
        fingerprint,
        membership: None,
        proposal: 0,
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
        let blocks = match call.blocks(self.group.rank, self.group.world_size()) {
            Ok(blocks) => blocks,
            Err(error) => {
                let error = self.group.settle(error);
                self.dump();
                return Err(error);
            }
        };
        let rank = self.group.rank;
        let outcome = match call.operation {
            Operation::Send { to } => self.transfer(call, blocks.numel, (rank, to)),
            Operation::Receive { from } => self.transfer(call, blocks.numel, (from, rank)),
            _ => {
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
        let outcome = self.join(membership);
        let Some((founding, number)) = self.end(outcome)? else {
            return Ok(None);
        };
        let native = match &self.native {
            None => None,
            Some(native) => {
                // All are here, but MPI's own setting up does not come back by itself.
                let _watched = self.group.watched(self.group.now_ns());
                let made = native.of_members(&founding.members, number);
                Some(made.map_err(|reason| self.group.refused("split", reason))?)
            }
        };
        let engine = Arc::clone(&self.group.engine);
        let group = Group::new(engine, founding, Some(Arc::clone(&self.group)));
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
        let group = Arc::downgrade(&self.group);
        Aborter::new(self.group.rank, move |error| {
            if let Some(group) = group.upgrade() {
                group.announce(error);
            }
        })
    }

    fn recorder(&self) -> &FlightRecorder {
        match &self.shared {
            Some(shared) => shared.recorder(),
            None => &self.recorder,
        }
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        match &mut self.shared {
            Some(shared) => shared.allocate(len_bytes),
            None => machine::unshared(self.group.rank, len_bytes),
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
        Err(machine::unseen(self.group.rank))
    }

    fn failure(&self) -> Option<CollectiveError> {
        if let Some(shared) = &self.shared {
            return shared.failure();
        }
        self.group.poll();
        match self.group.settled() {
            None if self.group.is_ending() => Some(self.group.settle_as_told()),
            settled => settled,
        }
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        if self.shared.is_some() {
            return;
        }
        let (rank, calls) = (self.group.rank, self.recorder.calls_begun());
        if std::thread::panicking() {
            self.dump();
            self.group
                .announce(CollectiveError::Panicked { rank, calls });
        } else {
            self.group.leave(calls);
        }
    }
}
