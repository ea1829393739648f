//! Device memory.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cust::sys::{self, CUdeviceptr, CUresult};
use fusestep_launch::{BackendError, Buffer};

use crate::NAME;
use crate::session::Session;
use crate::status::check;

/// Memory of one device; freed when dropped.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    session: Arc<Session>,
    /// 0 if the buffer is empty; else aligned to 256 bytes, as the driver's allocations are.
    address: CUdeviceptr,
    len_bytes: usize,
}

impl DeviceBuffer {
    /// Zeroed memory.
    pub(crate) fn zeroed(session: &Arc<Session>, len_bytes: usize) -> Result<Self, BackendError> {
        let mut buffer = Self {
            session: Arc::clone(session),
            address: 0,
            len_bytes: 0,
        };
        if len_bytes == 0 {
            return Ok(buffer);
        }
        session.enter()?;
        let mut address = 0;
        // SAFETY: writes one address; the context is current.
        let status = unsafe { sys::cuMemAlloc_v2(&mut address, len_bytes) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(BackendError::OutOfMemory {
                backend: NAME,
                len_bytes,
            });
        }
        check(status, || format!("allocating {len_bytes} bytes"))?;
        // From here on the memory is the buffer's, which frees it if the next call fails.
        buffer.address = address;
        buffer.len_bytes = len_bytes;
        // SAFETY: the range was allocated above and nothing else refers to it.
        let status = unsafe { sys::cuMemsetD8Async(address, 0, len_bytes, session.stream()) };
        check(status, || format!("zeroing {len_bytes} bytes"))?;
        Ok(buffer)
    }

    /// The buffer, if it is one of this session.
    pub(crate) fn of<'a>(
        session: &Arc<Session>,
        buffer: &'a dyn Buffer,
    ) -> Result<&'a Self, BackendError> {
        buffer
            .as_any()
            .downcast_ref::<Self>()
            .filter(|own| Arc::ptr_eq(&own.session, session))
            .ok_or(BackendError::ForeignBuffer { backend: NAME })
    }

    /// Where the buffer lies; 0 if it is empty.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn write(&mut self, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        let range = self.range(offset_bytes, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        self.session.enter()?;
        // SAFETY: `range` lies in the allocation; `bytes` is borrowed until the copy is done, which is waited for below.
        let status = unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                range.start,
                bytes.as_ptr().cast(),
                bytes.len(),
                self.session.stream(),
            )
        };
        let copied = check(status, || {
            format!("copying {} bytes to the device", bytes.len())
        });
        copied.and(self.session.synchronize())
    }

    pub(crate) fn read(&self, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        let range = self.range(offset_bytes, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        self.session.enter()?;
        // SAFETY: `range` lies in the allocation; `bytes` is borrowed until the copy is done, which is waited for below.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast(),
                range.start,
                bytes.len(),
                self.session.stream(),
            )
        };
        let copied = check(status, || {
            format!("copying {} bytes from the device", bytes.len())
        });
        copied.and(self.session.synchronize())
    }

    /// The addresses of `len_bytes` bytes from `offset_bytes` on.
    fn range(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<Range<CUdeviceptr>, BackendError> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => {
                Ok(self.address + offset_bytes as u64..self.address + end as u64)
            }
            _ => Err(BackendError::OutOfBounds {
                backend: NAME,
                offset_bytes,
                len_bytes,
                found: self.len_bytes,
            }),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 && self.session.enter().is_ok() {
            // The driver waits for work that uses the memory. An error of earlier work has no one to go to here.
            // SAFETY: the address was allocated in `zeroed` and is freed once.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl Buffer for DeviceBuffer {
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
