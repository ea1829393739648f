//! Host buffers go through device memory.

use fusestep_collective::{Blocks, Buffers, CollectiveError, Communicator, Fingerprint, Operation};

use crate::communicator::{Memory, NcclCommunicator};
use crate::device::DeviceBuffer;

impl NcclCommunicator {
    /// Copies input to the device, makes the call there and copies the result back.
    pub(crate) fn through_the_device(
        &mut self,
        buffers: &mut Buffers<'_>,
        blocks: Blocks<'_>,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let memory = match buffers {
            Buffers::InPlace(buffer) => {
                self.stage(0, buffer.len(), buffer, print)?;
                Memory::Same(self.address(0))
            }
            Buffers::OutOfPlace { send, receive } => {
                self.stage(0, send.len(), send, print)?;
                self.stage(1, receive.len(), &[], print)?;
                Memory::Two {
                    send: self.address(0),
                    receive: self.address(1),
                }
            }
        };
        self.move_data(memory, blocks, print)?;
        if !gets_a_result(print.operation, self.rank()) {
            return Ok(());
        }
        let (place, host): (usize, &mut [u8]) = match buffers {
            Buffers::InPlace(buffer) => (0, buffer),
            Buffers::OutOfPlace { receive, .. } => (1, receive),
        };
        let staged = self.staged[place].take();
        let outcome = self.engine(print, |link| match &staged {
            Some(staged) => staged.get(0, host, link.stream),
            None => Ok(()),
        });
        self.staged[place] = staged;
        outcome
    }

    /// Device memory of at least this length, with these bytes at its start.
    fn stage(
        &mut self,
        place: usize,
        len_bytes: usize,
        bytes: &[u8],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let kept = self.staged[place].take();
        let kept = kept.filter(|kept| kept.len_bytes() >= len_bytes);
        let staged = match kept {
            Some(kept) => kept,
            None => self.engine(print, |link| {
                DeviceBuffer::allocate(&link.device, len_bytes)
            })?,
        };
        self.engine(print, |link| staged.put(0, bytes, link.stream))?;
        self.staged[place] = Some(staged);
        Ok(())
    }

    fn address(&self, place: usize) -> u64 {
        self.staged[place].as_ref().map_or(0, DeviceBuffer::address)
    }
}

/// Whether an operation writes anything on `rank`.
fn gets_a_result(operation: Operation, rank: usize) -> bool {
    match operation {
        Operation::Reduce { root, .. } | Operation::Gather { root } => rank == root,
        Operation::Send { .. }
        | Operation::Barrier
        | Operation::Split
        | Operation::ReduceUpdate => false,
        _ => true,
    }
}
