//! The engine's calls: the order of their steps.

use std::sync::{Arc, Mutex};

use fusestep_collective::{
    Aborter, Begun, Blocks, Call, CallContext, CallShape, CollectiveError, Engine, FlightRecorder,
    Membership, Movement, Operation, Pair, Place,
};

use crate::by_messages::ByMessages;
use crate::group::Group;
use crate::library::Kind;
use crate::party::Party;
use crate::wire::Header;
use crate::{Compare, algorithms, split};

impl Engine for ByMessages {
    fn place(&self) -> Place {
        let Group { rank, begun, .. } = *self.group;
        Place { rank, world_size: self.group.world_size(), begun }
    }

    /// Compares the call if options say so, then moves its data.
    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let print = begun.print;
        let first = match self.group.options.compare {
            // A barrier is its exchange of headers.
            _ if call.operation == Operation::Barrier => true,
            Compare::EveryCall => true,
            Compare::FirstOfEach => self.agreed.insert(print),
        };
        if first {
            self.meet(begun, Party::All(print.sequence), Header::of(print))?;
            self.begun_ns = self.group.now_ns();
        } else {
            self.enter(begun)?
        }
        algorithms::move_data(self, call, blocks, &print)
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let (own, print) = (self.group.rank, begun.print);
        let peer = pair.peer(own);
        let met = self.meet(begun, Party::Pair(peer), Header::of(print));
        met.map_err(|error| error.with_ranks(&[own.min(peer), own.max(peer)]))?;
        let whole = 0..blocks.numel * call.dtype.len_bytes();
        let movement = Movement { operation: call.operation, blocks: std::slice::from_ref(&whole) };
        algorithms::carry_out(self, &movement, call.buffers, Kind::Transfer, &print);
        Ok(())
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        split::join(self, begun, membership)
    }

    /// Settles on one error with the other ranks.
    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        let error = match error {
            CollectiveError::Left { .. } => error,
            error => self.group.settle(error),
        };
        self.tell_others();
        error
    }

    fn leave(&mut self, last: CollectiveError) {
        match last {
            CollectiveError::Left { calls, .. } => self.group.leave(calls),
            last => {
                self.group.announce(last);
                self.tell_others();
            }
        }
    }

    fn aborter(&self) -> Aborter {
        Aborter::of(self.group.rank, &self.group, Group::announce, Group::failure)
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.group.failure()
    }

    fn agreed(&self, shape: &CallShape<'_>, context: &CallContext) -> Option<usize> {
        self.agreed.like(shape, context)
    }

    /// The copy of the recorder that other threads can write to disk. `None` without a folder,
    /// which saves locks and looks at the clock.
    fn mirror(&self) -> Option<Arc<Mutex<FlightRecorder>>> {
        self.group.options.dump_folder.as_ref()?;
        Some(Arc::clone(&self.group.mirror))
    }
}
