//! Calls by which ranks tell each other parts of what they have.

use std::ops::Range;

use fusestep_collective::{Buffers, Call, CollectiveError, DeviceBuffers, DeviceCall, Operation};
use fusestep_launch::Buffer;
use fusestep_tensor::{DType, DeviceSliceMut};

use crate::run::comms::bytes::foreign;
use crate::run::comms::calls::Comms;

impl Comms<'_> {
    /// Sends each rank its part of `send`, which is empty on all ranks but `root`.
    pub(crate) fn scatter(
        &mut self,
        root: usize,
        dtype: DType,
        counts: &[usize],
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let operation = self.count_scatter(root, dtype, counts);
        let buffers = Buffers::OutOfPlace { send, receive };
        self.communicator().execute(Call { operation, dtype, counts: Some(counts), buffers })
    }

    /// [`Comms::scatter`] in memory of a device. Both buffers are handed over.
    pub(crate) fn scatter_on_device(
        &mut self,
        root: usize,
        dtype: DType,
        counts: &[usize],
        send: &mut dyn Buffer,
        place: Range<usize>,
        receive: &mut dyn Buffer,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank();
        let operation = self.count_scatter(root, dtype, counts);
        let sent = if root == rank { place } else { 0..0 };
        let received = 0..counts[rank] * dtype.len_bytes();
        let both = slice(send, sent).zip(slice(receive, received));
        let (send, receive) = both.ok_or_else(|| foreign(rank))?;
        let buffers = DeviceBuffers::OutOfPlace { send, receive };
        self.communicator().execute_on_device(DeviceCall {
            operation,
            dtype,
            counts: Some(counts),
            buffers,
        })
    }

    fn count_scatter(&mut self, root: usize, dtype: DType, counts: &[usize]) -> Operation {
        let operation = Operation::Scatter { root };
        self.count_in_world(operation, counts.iter().sum::<usize>() * dtype.len_bytes());
        operation
    }
}

/// Bytes of a buffer that was handed over; `None` beyond its end, and before.
fn slice(buffer: &mut dyn Buffer, range: Range<usize>) -> Option<DeviceSliceMut<'_>> {
    buffer.device_mut()?.part(range)
}
