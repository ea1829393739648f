//! Device memory of a communicator for its calls, allocated when the communicator is founded.

use std::sync::Arc;

use crate::buffer::DeviceBuffer;
use crate::cut::GRAIN;
use crate::device::Device;

/// Memory for calls; a call that needs more goes through it in segments.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Contributions of other ranks to the part that this rank reduces. In an all-to-all in place,
    /// copies of the blocks to be sent.
    pub(crate) received: DeviceBuffer,
    /// Copies of host buffers.
    pub(crate) staging: DeviceBuffer,
}

impl Workspace {
    /// Allocates the memory of a group of `ranks`: twice `len_bytes`, or more if that is too little
    /// for a segment of each rank.
    pub(crate) fn allocate(
        device: &Arc<Device>,
        len_bytes: usize,
        ranks: usize,
    ) -> Result<Self, String> {
        let len_bytes = len_bytes.max(GRAIN * ranks);
        let buffer = || {
            DeviceBuffer::allocate(device, len_bytes).map_err(|reason| {
                format!(
                    "{reason}, for twice {len_bytes} bytes that calls pass through; expected so \
                     much free memory, or smaller `NcclOptions::scratch_bytes`"
                )
            })
        };
        Ok(Self { received: buffer()?, staging: buffer()? })
    }
}
