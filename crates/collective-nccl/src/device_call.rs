//! Calls on memory of the GPU.

use std::ops::Range;

use fusestep_collective::{CallShape, CollectiveError, Communicator, Lengths, Operation};
use fusestep_tensor::DType;

use crate::NcclError;
use crate::buffer::DeviceBuffer;
use crate::communicator::NcclCommunicator;
use crate::driver::Address;

/// Device memory of a call; as [`fusestep_collective::Buffers`] of the host.
#[derive(Debug)]
pub enum DeviceBuffers<'a> {
    /// One buffer of the whole length.
    InPlace(&'a mut DeviceBuffer),
    /// Two buffers.
    OutOfPlace {
        /// The input.
        send: &'a DeviceBuffer,
        /// The result.
        receive: &'a mut DeviceBuffer,
    },
}

/// A call on device memory; as [`fusestep_collective::Call`] on the host's.
#[derive(Debug)]
pub struct DeviceCall<'a> {
    /// What to do.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// Input and result.
    pub buffers: DeviceBuffers<'a>,
}

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
        DeviceBuffer::allocate(&self.site.device, len_bytes).map_err(|reason| NcclError::Call {
            call: "cuMemAlloc",
            reason,
        })
    }

    /// Memory that the caller already has on this rank's GPU, in its primary context.
    ///
    /// # Safety
    /// `address` leads to `len_bytes` bytes there, which live as long as the buffer; nothing else
    /// uses them during a call, and what was enqueued for them on other streams has ended.
    pub unsafe fn borrow_device_memory(&self, address: u64, len_bytes: usize) -> DeviceBuffer {
        // SAFETY: as required of the caller.
        unsafe { DeviceBuffer::borrow(&self.site.device, address, len_bytes) }
    }

    /// [`execute`](Communicator::execute) on device memory: nothing goes through the host.
    ///
    /// # Errors
    /// As there; [`CollectiveError::Refused`] for memory of another GPU.
    pub fn execute_on_device(&mut self, call: DeviceCall<'_>) -> Result<(), CollectiveError> {
        let (memory, lengths, devices) = match &call.buffers {
            DeviceBuffers::InPlace(buffer) => (
                Memory::Same(buffer.address),
                Lengths::InPlace(buffer.len_bytes()),
                [buffer.device.index; 2],
            ),
            DeviceBuffers::OutOfPlace { send, receive } => (
                Memory::Two {
                    send: send.address,
                    receive: receive.address,
                },
                Lengths::OutOfPlace {
                    send: send.len_bytes(),
                    receive: receive.len_bytes(),
                },
                [send.device.index, receive.device.index],
            ),
        };
        let own = self.site.device.index;
        if let Some(other) = devices.into_iter().find(|&device| device != own) {
            let refused = CollectiveError::Refused {
                rank: self.rank(),
                operation: call.operation.name(),
                reason: format!(
                    "expected memory of GPU {own}, this rank's, found some of GPU {other}"
                ),
            };
            return self.end(Err(refused));
        }
        let shape = CallShape {
            operation: call.operation,
            dtype: call.dtype,
            counts: call.counts,
            lengths,
        };
        self.run(shape, |comm, blocks, print| {
            let ranges = comm.ranges(blocks, print);
            let len_bytes = blocks.numel * print.dtype.len_bytes();
            comm.move_data(memory, &ranges, len_bytes, print)
        })
    }
}
