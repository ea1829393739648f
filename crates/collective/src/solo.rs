//! A world of one rank.

use std::time::Instant;

use crate::{
    Aborter, Buffers, Call, CallContext, CollectiveError, Communicator, FlightRecorder, Membership,
    Operation, RankMemory, ReduceUpdate,
};
use smallvec::smallvec;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The only rank of its world: every call copies input to result, if they are apart, and never
/// waits.
#[derive(Debug)]
pub struct Solo {
    sequence: u64,
    context: CallContext,
    recorder: FlightRecorder,
    /// What closed it; here, too, an error is the last word.
    closed: Arc<Mutex<Option<CollectiveError>>>,
}

impl Solo {
    /// A world of one that remembers its last 256 calls.
    pub fn new() -> Self {
        Self {
            sequence: 0,
            context: CallContext::default(),
            recorder: FlightRecorder::new(0, 1, 256, Instant::now()),
            closed: Arc::default(),
        }
    }

    fn close(&self, error: CollectiveError) -> CollectiveError {
        lock(&self.closed).get_or_insert(error).clone()
    }
}

fn lock<T>(closed: &Mutex<T>) -> MutexGuard<'_, T> {
    closed.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Solo {
    fn default() -> Self {
        Self::new()
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let blocks = call.blocks(0, 1).map_err(|error| self.close(error))?;
        self.sequence += 1;
        self.recorder.begin(&call.shape().fingerprint(blocks.numel, self.sequence, self.context));
        if let Buffers::OutOfPlace { send, receive } = call.buffers
            && !matches!(call.operation, Operation::Barrier)
        {
            receive.copy_from_slice(send);
        }
        self.recorder.end(Ok(()));
        Ok(())
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        match self.failure() {
            Some(error) => Err(error),
            None => Ok(membership.map(|_| Box::new(Solo::new()) as Box<dyn Communicator>)),
        }
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let closed = Arc::clone(&self.closed);
        Aborter::new(0, move |error| {
            lock(&closed).get_or_insert(error);
        })
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn reduce_update(
        &mut self,
        call: ReduceUpdate<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let blocks = call.blocks(0, 1).map_err(|error| self.close(error))?;
        self.sequence += 1;
        let fingerprint = call.fingerprint(blocks.numel, self.sequence, self.context);
        self.recorder.begin(&fingerprint);
        work(RankMemory {
            rank: 0,
            grads: smallvec![call.grads],
            replicas: call.replicas.into_iter().map(|own| smallvec![own.bytes]).collect(),
        });
        self.recorder.end(Ok(()));
        Ok(())
    }

    fn failure(&self) -> Option<CollectiveError> {
        lock(&self.closed).clone()
    }
}
