//! Calls on memory of a device.

use fusestep_tensor::{DType, DeviceSliceMut};

use crate::{CallShape, Lengths, Operation};

/// Device memory of a call, like [`Buffers`](crate::Buffers) of the host.
#[derive(Debug)]
pub enum DeviceBuffers<'a> {
    /// One buffer of the whole length; a rank's block lies at its place in it.
    InPlace(DeviceSliceMut<'a>),
    /// Two buffers.
    OutOfPlace {
        /// The input, which is only read.
        send: DeviceSliceMut<'a>,
        /// The result.
        receive: DeviceSliceMut<'a>,
    },
}

/// A call on device memory, like [`Call`](crate::Call) on host memory.
#[derive(Debug)]
pub struct DeviceCall<'a> {
    /// The operation of the call.
    pub operation: Operation,
    /// The elements' type.
    pub dtype: DType,
    /// Elements of each rank's block, for the operations that have blocks; the same on all ranks.
    pub counts: Option<&'a [usize]>,
    /// Input and result.
    pub buffers: DeviceBuffers<'a>,
}

impl<'a> DeviceBuffers<'a> {
    /// Input and result; in place both are the one buffer.
    pub fn both(&self) -> [&DeviceSliceMut<'a>; 2] {
        match self {
            DeviceBuffers::InPlace(memory) => [memory; 2],
            DeviceBuffers::OutOfPlace { send, receive } => [send, receive],
        }
    }
}

impl<'a> DeviceCall<'a> {
    /// The call without its memory.
    pub fn shape(&self) -> CallShape<'a> {
        CallShape {
            operation: self.operation,
            dtype: self.dtype,
            counts: self.counts,
            lengths: match &self.buffers {
                DeviceBuffers::InPlace(memory) => Lengths::InPlace(memory.len_bytes()),
                DeviceBuffers::OutOfPlace { send, receive } => {
                    Lengths::OutOfPlace { send: send.len_bytes(), receive: receive.len_bytes() }
                }
            },
        }
    }
}
