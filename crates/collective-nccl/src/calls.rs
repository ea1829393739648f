//! The engine's calls: ranks compare them over the control communicator, then NCCL moves the data.

use std::time::Instant;

use fusestep_collective::{
    Aborter, Begun, Blocks, Buffers, Call, CollectiveError, Communicator, DeviceCall, Engine,
    Fingerprint, Membership, OnDevice, Operation, Pair, Place, ReduceOp,
};
use fusestep_tensor::DeviceOrder;

use crate::founding::as_call_error;
use crate::gpus::{Enqueued, Gpus};
use crate::memory::Memory;
use crate::{data, exchange, staging};

/// Progress of a call when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    /// The call's data has arrived.
    Done,
    /// The call's data will arrive in the order of the stream.
    Enqueued,
}

impl Gpus {
    /// Compares a call with those of the other ranks.
    fn compare(&mut self, begun: &Begun<'_>) -> Result<Fingerprint, CollectiveError> {
        let named = begun.named();
        self.last = Some(named);
        let pair = begun.operation.pair(self.rank());
        exchange::announce(&mut *self.control, &begun.print, pair, begun.timeout)?;
        Ok(named)
    }

    /// Compares a call, then moves its data by `body`, which returns whether the call is done or
    /// only enqueued.
    fn call(
        &mut self,
        begun: &Begun<'_>,
        body: impl FnOnce(&mut Self, &Fingerprint) -> Result<Moved, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let print = self.compare(begun)?;
        if print.operation == Operation::Barrier {
            return Ok(());
        }
        let under_way = self.site.device.begin_call();
        let moved = body(self, &print);
        if let Err(error) = &moved {
            self.break_off(error);
        }
        // A call that is done was behind all others on the stream.
        self.enqueued = match moved {
            Ok(Moved::Enqueued) => Some(Enqueued { print, under_way }),
            _ => None,
        };
        moved.map(|_| ())
    }
}

impl Engine for Gpus {
    fn place(&self) -> Place {
        let (rank, world_size) = (self.rank(), self.world_size());
        Place { rank, world_size, begun: Instant::now() }
    }

    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let mut buffers: Buffers<'_> = call.buffers;
        self.call(begun, |gpus, print| {
            staging::through_the_device(gpus, &mut buffers, blocks, print)?;
            Ok(Moved::Done)
        })
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        _pair: Pair,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        self.collective(begun, call, blocks)
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        self.compare(begun)?;
        let control = self.control.split(membership)?;
        let Some(mut control) = control else {
            return Ok(None);
        };
        let rank = self.rank();
        let link = self.site.connect(&mut *control, &self.options);
        let link = link.map_err(|error| as_call_error(error, rank))?;
        Ok(Some(Self::new(control, self.site.clone(), link, self.options.clone())))
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        self.fail(error)
    }

    /// The control communicator says by itself that this rank has left. After a panic the others
    /// would wait for data that this rank has begun.
    fn leave(&mut self, last: CollectiveError) {
        if !matches!(last, CollectiveError::Left { .. }) {
            self.break_off(&last);
        }
    }

    fn aborter(&self) -> Aborter {
        self.control.aborter()
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.closed.clone().or_else(|| self.control.failure())
    }

    /// The first error as this rank's call was told it: the control communicator knows its own
    /// calls only.
    fn closed(&self) -> Option<CollectiveError> {
        self.closed.clone()
    }

    fn carries(&self, operation: Operation) -> Result<(), &'static str> {
        match operation.reduce_op() {
            Some(ReduceOp::Tree(_)) => Err("expected another way to reduce, found a tree, for \
                                            which GPUs have no kernel; gather the elements and \
                                            add them"),
            _ => Ok(()),
        }
    }

    fn on_device(&mut self) -> Option<&mut dyn OnDevice> {
        Some(self)
    }
}

impl OnDevice for Gpus {
    fn ordinal(&self) -> u32 {
        self.site.device.index as u32
    }

    /// Makes a call behind the work that the memory's owner has enqueued. The owner's next work
    /// comes behind the call.
    fn execute(
        &mut self,
        begun: &mut Begun<'_>,
        call: DeviceCall<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let both = call.buffers.both();
        let memory = match both.map(|memory| memory.address()) {
            [send, receive] if send == receive => Memory::Same(send),
            [send, receive] => Memory::Two { send, receive },
        };
        let orders = both.map(|memory| memory.order());
        self.call(begun, |gpus, print| {
            let events = orders.iter().filter_map(|order| match order {
                DeviceOrder::HostWaits => None,
                DeviceOrder::Events { ready, done } => Some([*ready, *done]),
            });
            for [ready, _] in events.clone() {
                gpus.engine(print, |link| link.follow(ready))?;
            }
            let ranges = blocks.all_bytes(print.dtype.len_bytes());
            let len_bytes = blocks.numel * print.dtype.len_bytes();
            data::move_data(gpus, memory, &ranges, len_bytes, print)?;
            for [_, done] in events.clone() {
                gpus.engine(print, |link| link.tell(done))?;
            }
            if events.count() == orders.len() {
                return Ok(Moved::Enqueued);
            }
            gpus.finish(print)?;
            Ok(Moved::Done)
        })
    }

    fn finish(&mut self) -> Result<(), CollectiveError> {
        let Some(Enqueued { print, under_way }) = self.enqueued.take() else {
            return Ok(());
        };
        let done = Gpus::finish(self, &print);
        if let Err(error) = &done {
            self.break_off(error);
        }
        drop(under_way);
        done
    }

    fn control(&mut self) -> &mut dyn Communicator {
        self.control.as_mut()
    }
}
