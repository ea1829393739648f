//! Calls on memory of a device.

use fusestep_launch::DeviceSliceMut;
use fusestep_tensor::DType;

use crate::{CallShape, Lengths, Operation};

/// Device memory of a call; as [`Buffers`](crate::Buffers) of the host.
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

/// A call on device memory; as [`Call`](crate::Call) on the host's.
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

impl<'a> DeviceBuffers<'a> {
    /// Input and result, which are one in place.
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
