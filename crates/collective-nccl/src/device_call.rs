//! Calls on memory of the GPU.

use std::ops::Range;

use fusestep_collective::{CollectiveError, Communicator, DeviceCall};
use fusestep_launch::DeviceOrder;

use crate::buffer::DeviceBuffer;
use crate::communicator::{Moved, NcclCommunicator};
use crate::driver::Address;
use crate::{NcclError, movement};

/// Where a call's memory lies on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    Same(Address),
    Two { send: Address, receive: Address },
}

impl Memory {
    /// Input at an offset of the whole.
    pub(crate) fn input(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { send: base, .. }) = self;
        base + start as u64
    }

    /// The result at an offset of the whole.
    pub(crate) fn result(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { receive: base, .. }) = self;
        base + start as u64
    }

    /// The own block as input, which apart is all of it.
    pub(crate) fn input_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { send, .. } => send,
        }
    }

    /// The own block as result, which apart is all of it.
    pub(crate) fn result_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { receive, .. } => receive,
        }
    }
}

impl NcclCommunicator {
    /// Memory on this rank's GPU.
    ///
    /// # Errors
    /// The driver's words.
    pub fn device_buffer(&self, len_bytes: usize) -> Result<DeviceBuffer, NcclError> {
        let made = DeviceBuffer::allocate(&self.site.device, len_bytes);
        made.map_err(NcclError::of_call("cuMemAlloc"))
    }

    /// A call on device memory: behind what its owner has enqueued, and the owner's next work
    /// behind it.
    pub(crate) fn on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        let shape = call.shape();
        let both = call.buffers.both();
        let own = self.site.device.index;
        let other = both.iter().find(|memory| memory.ordinal() as usize != own);
        if let Some(other) = other {
            let found = other.ordinal();
            let reason =
                format!("expected memory of GPU {own}, this rank's, found some of GPU {found}");
            let operation = call.operation.name();
            return self.refuse(CollectiveError::refused(self.rank(), operation, reason));
        }
        let memory = match both.map(|memory| memory.address()) {
            [send, receive] if send == receive => Memory::Same(send),
            [send, receive] => Memory::Two { send, receive },
        };
        let orders = both.map(|memory| memory.order());
        self.run(shape, |comm, blocks, print| {
            let events = orders.iter().filter_map(|order| match order {
                DeviceOrder::HostWaits => None,
                DeviceOrder::Events { ready, done } => Some((*ready, *done)),
            });
            for (ready, _) in events.clone() {
                comm.engine(print, |link| link.follow(ready))?;
            }
            let ranges = blocks.all_bytes(print.dtype.len_bytes());
            let len_bytes = blocks.numel * print.dtype.len_bytes();
            movement::move_data(comm, memory, &ranges, len_bytes, print)?;
            for (_, done) in events.clone() {
                comm.engine(print, |link| link.tell(done))?;
            }
            if events.count() == orders.len() {
                return Ok(Moved::Enqueued);
            }
            comm.finish(print)?;
            Ok(Moved::Done)
        })
    }
}
