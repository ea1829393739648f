//! Engines: how the ranks of a group reach each other. Everything else that a call needs is an
//! envelope around them, which [`Ranked`](crate::Ranked) writes once.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fusestep_coalesce::HostMemory;

use crate::communicator::zeroed;
use crate::{
    Aborter, Blocks, Call, CallContext, CallShape, CollectiveError, Communicator, DeviceCall,
    Fingerprint, FlightRecorder, Membership, Operation, Pair, RankMemory, ReduceUpdate,
};

/// A transport between the ranks of a group: it meets, compares fingerprints, and moves data.
///
/// Calls come checked, numbered and written down. An engine's errors close the group and end up in
/// the flight recorder without its doing.
pub trait Engine: Send + Sized + 'static {
    /// This rank's place in its group.
    fn place(&self) -> Place;

    /// Makes a call of all ranks: meets them, compares `begun.print`, and moves data.
    ///
    /// # Errors
    /// [`CollectiveError`], before any data has moved if ranks differ.
    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError>;

    /// Makes a send or a receive between the two ranks of `pair`.
    ///
    /// # Errors
    /// As [`collective`](Self::collective).
    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError>;

    /// Makes this rank's engine in the group of those that pass the same colour. All ranks call it.
    ///
    /// # Errors
    /// As [`collective`](Self::collective).
    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError>;

    /// Closes the group because of a call's error; returns the error that holds, the first one.
    fn close(&mut self, error: CollectiveError) -> CollectiveError;

    /// Tells the others that this rank makes no more calls: it has left, or has panicked.
    fn leave(&mut self, last: CollectiveError);

    /// The aborter that breaks the group off, from any thread.
    fn aborter(&self) -> Aborter;

    /// The error that has closed the group, as far as this rank can tell without a call.
    fn failure(&self) -> Option<CollectiveError>;

    /// The error that calls return at once, for engines whose meeting does not say it. Such a call
    /// is neither counted nor written down.
    fn closed(&self) -> Option<CollectiveError> {
        None
    }

    /// Whether the engine makes calls of this operation.
    ///
    /// # Errors
    /// The expectation and what would work, with which the call is refused.
    fn carries(&self, _operation: Operation) -> Result<(), &'static str> {
        Ok(())
    }

    /// The elements of a call like one that all ranks have agreed on, whose checks would find the
    /// same as before.
    fn agreed(&self, _shape: &CallShape<'_>, _context: &CallContext) -> Option<usize> {
        None
    }

    /// A second flight recorder of the group, for threads that end the process.
    fn mirror(&self) -> Option<Arc<Mutex<FlightRecorder>>> {
        None
    }

    /// Zeroed memory for buffers of calls, as [`Communicator::allocate`] gives it.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] if there is not enough memory.
    fn allocate(&mut self, len_bytes: usize) -> Result<HostMemory, CollectiveError> {
        zeroed(self.place().rank, len_bytes)
    }

    /// The engine's calls on memory that ranks see of each other; `None` where they send it.
    fn on_shared(&mut self) -> Option<&mut dyn OnShared> {
        None
    }

    /// The engine's calls on memory of a device; `None` where it works in host memory.
    fn on_device(&mut self) -> Option<&mut dyn OnDevice> {
        None
    }
}

/// Calls on memory that ranks see of each other.
pub trait OnShared {
    /// Does `work` on this rank's block of all ranks' gradients and replicas, as
    /// [`Communicator::reduce_update`].
    ///
    /// # Errors
    /// As [`Engine::collective`].
    fn reduce_update(
        &mut self,
        begun: &mut Begun<'_>,
        call: ReduceUpdate<'_>,
        blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError>;
}

/// Calls on memory of a device.
pub trait OnDevice {
    /// The number of the device.
    fn ordinal(&self) -> u32;

    /// Makes a call on memory of this device.
    ///
    /// # Errors
    /// As [`Engine::collective`].
    fn execute(
        &mut self,
        begun: &mut Begun<'_>,
        call: DeviceCall<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError>;

    /// Waits until all enqueued calls are done, as [`Communicator::finish_on_device`].
    ///
    /// # Errors
    /// As [`Engine::collective`].
    fn finish(&mut self) -> Result<(), CollectiveError>;

    /// The connection between ranks for a few bytes of the host.
    fn control(&mut self) -> &mut dyn Communicator;
}

/// Place of a rank in its group.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The time from which the group's nanoseconds count.
    pub begun: Instant,
}

/// A call under way.
#[derive(Debug)]
pub struct Begun<'r> {
    /// The call as ranks compare it: a transfer is a send on both sides.
    pub print: Fingerprint,
    /// The rank's own operation, by which errors and the recorder name the call.
    pub operation: Operation,
    /// Nanoseconds from the group's beginning to this rank's arrival.
    pub arrived_ns: u64,
    /// The time at which ranks that have not come are late.
    pub deadline: Instant,
    /// The time from the arrival to the deadline.
    pub timeout: Duration,
    pub(crate) recorder: &'r mut FlightRecorder,
}

impl Begun<'_> {
    /// The call as errors and the recorder name it.
    pub fn named(&self) -> Fingerprint {
        Fingerprint { operation: self.operation, ..self.print }
    }

    /// Calls that this rank has begun, this one included.
    pub fn calls(&self) -> u64 {
        self.recorder.calls_begun()
    }

    /// Writes down the last rank to come, and how long after this rank it came.
    pub fn waited(&mut self, straggler: usize, waited_ns: u64) {
        self.recorder.waited(straggler, waited_ns);
    }

    /// Writes down the error of a call that the process does not survive; says where.
    pub fn end_with_process(&mut self, error: &CollectiveError) -> String {
        self.recorder.end(Err(error));
        self.recorder.place()
    }
}
