//! A world of one rank.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fusestep_simd::Level;
use smallvec::smallvec;

use crate::{
    Aborter, Begun, Blocks, Buffers, Call, CallOptions, CollectiveError, Divisor, Engine,
    Membership, OnShared, Operation, Pair, Place, RankMemory, Ranked, ReduceOp, ReduceUpdate,
    Timeout, reduce_slices,
};

/// The only rank of its world. Every call copies its input to its result, if they are apart, and
/// never waits.
pub type Solo = Ranked<Alone>;

/// The engine of a world of one rank.
#[derive(Debug)]
pub struct Alone {
    /// The error that closed the world; here, too, an error is the last word.
    closed: Arc<Mutex<Option<CollectiveError>>>,
    /// The error that an aborter closed the world with, then the same of each group that it was
    /// split from.
    aborted: Vec<Arc<Mutex<Option<CollectiveError>>>>,
}

impl Solo {
    /// A world of one that remembers its last 256 calls.
    pub fn new() -> Self {
        let options = CallOptions {
            timeout: Timeout::new(Duration::from_secs(60)),
            recorded_calls: 256,
            dump_folder: None,
        };
        Self::on(Alone { closed: Arc::default(), aborted: vec![Arc::default()] }, options)
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

impl Engine for Alone {
    fn place(&self) -> Place {
        Place { rank: 0, world_size: 1, begun: Instant::now() }
    }

    fn collective(
        &mut self,
        _begun: &mut Begun<'_>,
        call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        if call.operation == Operation::Barrier {
            return Ok(());
        }
        let result = match call.buffers {
            Buffers::InPlace(bytes) => bytes,
            Buffers::OutOfPlace { send, receive } => {
                receive.copy_from_slice(send);
                receive
            }
        };
        // A mean of more than this rank's elements.
        if let Some(op @ ReduceOp::Tree(divisor)) = call.operation.reduce_op()
            && divisor != Divisor::ONE
        {
            let mut block = [0; 4096];
            for part in result.chunks_mut(block.len()) {
                let block = &mut block[..part.len()];
                block.copy_from_slice(part);
                reduce_slices(Level::detect(), call.dtype, op, &[block], part);
            }
        }
        Ok(())
    }

    /// Makes no transfer: the checks of a call refuse the rank itself as the peer, and there is no
    /// other.
    fn transfer(
        &mut self,
        _begun: &mut Begun<'_>,
        pair: Pair,
        _call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        unreachable!("{pair:?} in a world of one rank")
    }

    fn join(
        &mut self,
        _begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        Ok(membership.map(|_| {
            let own = Arc::default();
            let aborted = [own].into_iter().chain(self.aborted.iter().map(Arc::clone));
            Self { closed: Arc::default(), aborted: aborted.collect() }
        }))
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        lock(&self.closed).get_or_insert(error).clone()
    }

    fn leave(&mut self, _last: CollectiveError) {}

    fn aborter(&self) -> Aborter {
        let aborted = Arc::clone(&self.aborted[0]);
        Aborter::new(0, move |error| {
            lock(&aborted).get_or_insert(error);
        })
    }

    fn failure(&self) -> Option<CollectiveError> {
        let closed = lock(&self.closed).clone();
        closed.or_else(|| self.aborted.iter().find_map(|aborted| lock(aborted).clone()))
    }

    /// The error that has closed the world: there is nobody to meet who would say it.
    fn closed(&self) -> Option<CollectiveError> {
        self.failure()
    }

    fn on_shared(&mut self) -> Option<&mut dyn OnShared> {
        Some(self)
    }
}

impl OnShared for Alone {
    fn reduce_update(
        &mut self,
        _begun: &mut Begun<'_>,
        call: ReduceUpdate<'_>,
        _blocks: Blocks<'_>,
        work: &mut dyn FnMut(RankMemory<'_>),
    ) -> Result<(), CollectiveError> {
        work(RankMemory {
            rank: 0,
            grads: smallvec![call.grads],
            replicas: call.replicas.into_iter().map(|own| smallvec![own.bytes]).collect(),
        });
        Ok(())
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collectives, Communicator, ReduceOp};

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
