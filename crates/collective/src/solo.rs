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
    /// What has broken it off, then the same of each group that it was split from.
    aborted: Vec<Arc<Mutex<Option<CollectiveError>>>>,
}

impl Solo {
    /// A world of one that remembers its last 256 calls.
    pub fn new() -> Self {
        Self {
            sequence: 0,
            context: CallContext::default(),
            recorder: FlightRecorder::new(0, 1, 256, Instant::now()),
            closed: Arc::default(),
            aborted: vec![Arc::default()],
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
            None => Ok(membership.map(|_| {
                let mut part = Solo::new();
                part.aborted.extend(self.aborted.iter().map(Arc::clone));
                Box::new(part) as Box<dyn Communicator>
            })),
        }
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let aborted = Arc::clone(&self.aborted[0]);
        Aborter::new(0, move |error| {
            lock(&aborted).get_or_insert(error);
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
        let closed = lock(&self.closed).clone();
        closed.or_else(|| self.aborted.iter().find_map(|aborted| lock(aborted).clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collectives, ReduceOp};

    #[test]
    fn breaking_a_group_off_breaks_off_what_was_split_from_it_and_nothing_above() {
        let everyone = Some(Membership { colour: 0, key: 0 });
        let mut whole = Solo::new();
        let mut part = whole.split(everyone).unwrap().unwrap();
        let mut part_of_part = part.split(everyone).unwrap().unwrap();
        part.aborter().abort("enough");
        assert_eq!(part_of_part.barrier().unwrap_err().to_string(), "aborted by rank 0: enough");
        assert!(part.all_reduce(&mut [1.0f32], ReduceOp::Sum).is_err());
        whole.barrier().unwrap();
        // What a group has refused closes itself alone.
        let mut other = whole.split(everyone).unwrap().unwrap();
        whole.broadcast(&mut [1.0f32], 1).unwrap_err();
        other.barrier().unwrap();
    }
}
