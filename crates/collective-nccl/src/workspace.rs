//! Device memory that a communicator has for its calls, made when it is founded.

use std::sync::Arc;

use crate::buffer::DeviceBuffer;
use crate::cut::GRAIN;
use crate::device::Device;

/// Memory for calls; longer ones go through it in segments.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// What others contribute to the part that this rank reduces, and what has to leave before its
    /// place is written.
    pub(crate) received: DeviceBuffer,
    /// Where host buffers go.
    pub(crate) staging: DeviceBuffer,
}

impl Workspace {
    /// Memory of a group of `ranks`, twice `len_bytes` or the little that takes a segment of each
    /// rank.
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
