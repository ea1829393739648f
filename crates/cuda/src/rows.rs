//! Rows of a launch's sums in device memory, one for each chunk.

use std::sync::Arc;

use fusestep_launch::{BackendError, Buffer, ROW_VALUES};

use crate::buffer::{Allocation, DeviceBuffer};
use crate::session::Session;
use crate::{NAME, Result};

/// Bytes of a row.
pub(crate) const ROW_BYTES: usize = ROW_VALUES as usize * size_of::<f64>();

/// Byte of a row from which on it has how often its tensor was skipped.
const COUNT_AT: usize = ROW_BYTES - 2 * size_of::<f64>();
/// Byte of a row from which on it has a 1 if its tensor was skipped in the last step, else a 0.
pub(crate) const SKIPPED_AT: usize = ROW_BYTES - size_of::<f64>();

/// Device memory for the sums of every chunk of a launch, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    buffer: Option<DeviceBuffer>,
    /// Skipped tensors that earlier buffers had counted.
    skipped: u64,
}

impl Rows {
    /// The address of at least `count` rows. Only a launch of more chunks than any before
    /// allocates.
    pub(crate) fn at_least(
        &mut self,
        session: &Arc<Session>,
        count: u64,
    ) -> Result<u64, BackendError> {
        let len_bytes = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(ROW_BYTES))
            .ok_or(BackendError::OutOfMemory { backend: NAME, len_bytes: usize::MAX })?;
        if let Some(buffer) = &self.buffer
            && buffer.len_bytes() >= len_bytes
        {
            return Ok(buffer.address());
        }
        self.skipped = self.take_skipped()?;
        let buffer = DeviceBuffer::zeroed(session, len_bytes)?;
        let address = buffer.address();
        self.buffer = Some(buffer);
        Ok(address)
    }

    /// Sets all rows to 0, in the order of the stream; returns their address.
    pub(crate) fn zero(&mut self) -> Result<u64, BackendError> {
        match &mut self.buffer {
            Some(buffer) => {
                buffer.zero()?;
                Ok(buffer.address())
            }
            None => Ok(0),
        }
    }

    /// Reads the first bytes; waits for the device.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        match &self.buffer {
            Some(buffer) => buffer.read(0, bytes),
            None => Ok(()),
        }
    }

    /// Writes the first bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.buffer {
            Some(buffer) => buffer.write(0, bytes),
            None => Ok(()),
        }
    }

    /// Counts tensors that others have skipped.
    pub(crate) fn count_skipped(&mut self, skipped: u64) {
        self.skipped += skipped;
    }

    /// The allocation that keeps the memory, once there is some.
    pub(crate) fn allocation(&self) -> Option<&Arc<Allocation>> {
        self.buffer.as_ref().map(DeviceBuffer::allocation)
    }

    /// Tensors skipped since the last call; waits for the device.
    pub(crate) fn take_skipped(&mut self) -> Result<u64, BackendError> {
        let mut skipped = self.skipped;
        if let Some(buffer) = &mut self.buffer {
            let mut bytes = vec![0; buffer.len_bytes()];
            buffer.read(0, &mut bytes)?;
            for row in bytes.chunks_exact(ROW_BYTES) {
                let counter = &row[COUNT_AT..SKIPPED_AT];
                skipped += bytemuck::pod_read_unaligned::<f64>(counter) as u64;
            }
            bytes.fill(0);
            buffer.write(0, &bytes)?;
        }
        self.skipped = 0;
        Ok(skipped)
    }
}
