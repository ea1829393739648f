//! The envelope of calls: checks, numbers, fingerprints, flight recorder, deadlines and the first
//! error, around any engine.

use std::path::PathBuf;
use std::time::Duration;

use fusestep_coalesce::HostMemory;

use crate::communicator::{not_on_device, not_shared};
use crate::{
    Aborter, Begun, Blocks, Call, CallContext, CallShape, CollectiveError, Communicator,
    DeviceCall, Engine, Fingerprint, FlightRecorder, Membership, Operation, Pair, Place,
    RankMemory, ReduceUpdate, Timeout,
};

/// Settings of a rank's calls on any engine.
#[derive(Clone, Debug)]
pub struct CallOptions {
    /// How long the rank waits for others.
    pub timeout: Timeout,
    /// Calls that the flight recorder keeps.
    pub recorded_calls: usize,
    /// Folder that the flight recorder is written to on the first error.
    pub dump_folder: Option<PathBuf>,
}

impl CallOptions {
    /// Options of the group that split number `call` has made for `colour`: the same timeout, and a
    /// folder of its own.
    pub fn of_group(&self, call: u64, colour: u32) -> Self {
        let folder = self.dump_folder.as_ref();
        Self {
            timeout: Timeout::new(self.timeout.get()),
            recorded_calls: self.recorded_calls,
            dump_folder: folder.map(|folder| folder.join(format!("group-{call}-{colour}"))),
        }
    }
}

/// A rank's communicator on an engine: every call is checked, numbered, written down and compared,
/// and its first error holds.
///
/// Giving it up while other ranks use theirs ends their calls with [`CollectiveError::Left`], or
/// [`CollectiveError::Panicked`] if its thread panicked.
#[derive(Debug)]
pub struct Ranked<E: Engine> {
    engine: E,
    place: Place,
    options: CallOptions,
    context: CallContext,
    /// Calls of all ranks so far.
    sequence: u64,
    /// Transfers so far with each rank: sends, receives. Empty before the first.
    transfers: Vec<[u64; 2]>,
    recorder: FlightRecorder,
    shares_memory: bool,
    device: Option<u32>,
}

impl<E: Engine> Ranked<E> {
    /// The communicator of a rank that has made no call on this engine.
    pub fn on(mut engine: E, options: CallOptions) -> Self {
        let place = engine.place();
        let calls = options.recorded_calls;
        let recorder = FlightRecorder::new(place.rank, place.world_size, calls, place.begun);
        Self {
            place,
            context: CallContext::default(),
            sequence: 0,
            transfers: Vec::new(),
            recorder: recorder.dumped_into(options.dump_folder.clone()).mirrored(engine.mirror()),
            shares_memory: engine.on_shared().is_some(),
            device: engine.on_device().map(|device| device.ordinal()),
            options,
            engine,
        }
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// How long this rank waits for others: from the next call on, what it was last set to.
    pub fn timeout(&self) -> &Timeout {
        &self.options.timeout
    }

    /// The error that calls return at once, if there is one.
    fn open(&self) -> Result<(), CollectiveError> {
        self.engine.closed().map_or(Ok(()), Err)
    }

    /// The number of the next call: of the group, or of a pair's transfers in one direction.
    fn number(&mut self, pair: Option<Pair>) -> u64 {
        let made = match pair {
            None => &mut self.sequence,
            Some(pair) => {
                let Place { rank, world_size, .. } = self.place;
                self.transfers.resize(world_size, [0; 2]);
                &mut self.transfers[pair.peer(rank)][pair.side(rank)]
            }
        };
        *made += 1;
        *made
    }

    /// Writes down that a call begins.
    fn begin(&mut self, mut print: Fingerprint) -> (&mut E, Begun<'_>) {
        let arrived_ns = self.recorder.begin(&print);
        let operation = print.operation;
        if let Operation::Receive { .. } = operation {
            print.operation = Operation::Send { to: self.place.rank };
        }
        let timeout = self.options.timeout.get();
        let begun = Begun {
            print,
            operation,
            arrived_ns,
            deadline: self.place.begun + Duration::from_nanos(arrived_ns) + timeout,
            timeout,
            recorder: &mut self.recorder,
        };
        (&mut self.engine, begun)
    }

    /// Makes a checked call, without its end.
    pub(crate) fn make(
        &mut self,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let pair = call.operation.pair(self.place.rank);
        let sequence = self.number(pair);
        let print = call.shape().fingerprint(blocks.numel, sequence, self.context);
        let (engine, mut begun) = self.begin(print);
        match pair {
            Some(pair) => engine.transfer(&mut begun, pair, call, blocks),
            None => engine.collective(&mut begun, call, blocks),
        }
    }

    /// Writes an outcome down; an error closes the group for everyone, and the first one holds.
    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| self.engine.close(error));
        self.recorder.end(outcome.as_ref().map(|_| ()));
        outcome
    }

    /// Checks that this rank can make a call, and says how it is cut into blocks.
    fn check<'a>(&mut self, shape: &CallShape<'a>) -> Result<Blocks<'a>, CollectiveError> {
        let Place { rank, world_size, .. } = self.place;
        let checked = shape.blocks(rank, world_size).and_then(|blocks| {
            let engine_does = self.engine.carries(shape.operation);
            let refused = |reason| CollectiveError::refused(rank, shape.operation.name(), reason);
            engine_does.map(|()| blocks).map_err(refused)
        });
        checked.map_err(|error| self.refuse(error))
    }

    /// Refuses a call that this rank cannot make.
    fn refuse(&mut self, error: CollectiveError) -> CollectiveError {
        let error = self.engine.close(error);
        self.recorder.dump_once();
        error
    }
}

impl<E: Engine> Communicator for Ranked<E> {
    fn rank(&self) -> usize {
        self.place.rank
    }

    fn world_size(&self) -> usize {
        self.place.world_size
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        self.open()?;
        let (shape, world_size) = (call.shape(), self.place.world_size);
        let blocks = match self.engine.agreed(&shape, &self.context) {
            Some(numel) => Blocks { numel, world_size, counts: None },
            None => self.check(&shape)?,
        };
        let outcome = self.make(call, blocks);
        self.end(outcome)
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        self.open()?;
        let sequence = self.number(None);
        let print = CallShape::SPLIT.fingerprint(0, sequence, self.context);
        let (engine, mut begun) = self.begin(print);
        let outcome = engine.join(&mut begun, membership);
        let Some(joined) = self.end(outcome)? else {
            return Ok(None);
        };
        let colour = membership.map_or(0, |own| own.colour);
        let options = self.options.of_group(sequence, colour);
        Ok(Some(Box::new(Self::on(joined, options))))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        self.engine.aborter()
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        self.engine.allocate(len_bytes)
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        let Place { rank, world_size, .. } = self.place;
        if !self.shares_memory {
            return Err(not_shared(rank));
        }
        self.open()?;
        let blocks = call.blocks(rank, world_size).map_err(|error| self.refuse(error))?;
        let sequence = self.number(None);
        let print = call.fingerprint(blocks.numel, sequence, self.context);
        let (engine, mut begun) = self.begin(print);
        let outcome = match engine.on_shared() {
            Some(engine) => engine.reduce_update(&mut begun, call, blocks, work),
            None => Err(not_shared(rank)),
        };
        self.end(outcome)
    }

    fn device(&self) -> Option<u32> {
        self.device
    }

    fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        let rank = self.place.rank;
        let Some(own) = self.device else {
            return Err(not_on_device(rank, &call));
        };
        self.open()?;
        let memory = call.buffers.both();
        if let Some(other) = memory.iter().find(|memory| memory.ordinal() != own) {
            let found = other.ordinal();
            let reason =
                format!("expected memory of GPU {own}, this rank's, found some of GPU {found}");
            let error = CollectiveError::refused(rank, call.operation.name(), reason);
            return Err(self.refuse(error));
        }
        let shape = call.shape();
        let blocks = self.check(&shape)?;
        let sequence = self.number(call.operation.pair(rank));
        let print = shape.fingerprint(blocks.numel, sequence, self.context);
        let (engine, mut begun) = self.begin(print);
        let outcome = match engine.on_device() {
            Some(engine) => engine.execute(&mut begun, call, blocks),
            None => Err(not_on_device(rank, &call)),
        };
        self.end(outcome)
    }

    fn finish_on_device(&mut self) -> Result<(), CollectiveError> {
        if self.device.is_some() {
            self.open()?;
        }
        let done = self.engine.on_device().map_or(Ok(()), |engine| engine.finish());
        done.or_else(|error| self.end(Err(error)))
    }

    fn control(&mut self) -> Option<&mut dyn Communicator> {
        self.engine.on_device().map(|engine| engine.control())
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.engine.failure()
    }
}

impl<E: Engine> Drop for Ranked<E> {
    fn drop(&mut self) {
        let (rank, calls) = (self.place.rank, self.recorder.calls_begun());
        if std::thread::panicking() {
            self.recorder.dump_once();
            self.engine.leave(CollectiveError::Panicked { rank, calls });
        } else {
            self.engine.leave(CollectiveError::Left { rank, calls });
        }
    }
}
