//! Copies to the host that nobody waits for until they are asked for.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cust::sys::{self, CUdeviceptr};
use fusestep_launch::{BackendError, Buffer};

use crate::Result;
use crate::buffer::DeviceBuffer;
use crate::event::{Event, EventUse};
use crate::session::Session;

/// Memory of the host that a device copies to or from, with the event behind its last copy.
#[derive(Debug)]
pub(crate) struct HostMemory {
    address: *mut u8,
    len_bytes: usize,
    event: Event,
    session: Arc<Session>,
}

// SAFETY: the address is that of memory with one owner; the driver writes there only while a copy
// is under way, whose owner waits for it before it reads.
unsafe impl Send for HostMemory {}

/// Host memory that is kept for later copies.
pub(crate) type Spare = Arc<Mutex<Vec<HostMemory>>>;

impl HostMemory {
    pub(crate) fn new(session: &Arc<Session>, len_bytes: usize) -> Result<Self, BackendError> {
        let event = Event::new(session, EventUse::Order)?;
        let mut address = ptr::null_mut();
        let allocating = || format!("allocating {len_bytes} bytes of the host's for a device");
        // SAFETY: writes one address; the context is current.
        session.call(allocating, |_| unsafe { sys::cuMemAllocHost_v2(&mut address, len_bytes) })?;
        Ok(Self { address: address.cast(), len_bytes, event, session: Arc::clone(session) })
    }

    /// Begins a copy of `bytes` from this memory to an address of the device, in the order of the
    /// stream. Waits for the last copy from here, and for nothing else.
    ///
    /// # Safety
    /// As many bytes of the device are allocated there, in the session's context.
    pub(crate) unsafe fn begin_write(&mut self, to: CUdeviceptr, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.len_bytes, "a copy is no longer than its memory");
        self.event.wait()?;
        // SAFETY: so many bytes, which no copy reads any more.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.address, bytes.len()) };
        let copying = || format!("copying {} bytes to the device", bytes.len());
        // SAFETY: the caller's; the memory is kept until the copy was waited for.
        self.session.call(copying, |stream| unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, self.address.cast(), bytes.len(), stream)
        })?;
        // SAFETY: the session's stream lives as long as it.
        unsafe { self.event.record(self.session.stream()) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.session.enter().is_ok() {
            // A copy from here may be under way; into it, `HostCopy` has waited for.
            let _ = self.event.wait();
            // SAFETY: allocated in `new` and freed once. An error has no one to go to here.
            let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
        }
    }
}

/// Bytes of a buffer on their way to the host.
#[derive(Debug)]
pub struct HostCopy {
    memory: Option<HostMemory>,
    len_bytes: usize,
    spare: Spare,
}

/// Begins a copy of a buffer's first `len_bytes` bytes, as [`crate::CudaBackend::begin_read`] says.
pub(crate) fn begin(
    session: &Arc<Session>,
    spare: &Spare,
    buffer: &dyn Buffer,
    len_bytes: usize,
) -> Result<HostCopy, BackendError> {
    let from = DeviceBuffer::of(session, buffer)?.range(0, len_bytes)?.start;
    // SAFETY: the buffer has so many bytes there, and is freed behind what is enqueued.
    unsafe { begin_at(session, spare, from, len_bytes) }
}

/// Begins a copy of `len_bytes` bytes from an address on.
///
/// # Safety
/// So many bytes are allocated there, in the session's context, until the copy is done.
pub(crate) unsafe fn begin_at(
    session: &Arc<Session>,
    spare: &Spare,
    from: CUdeviceptr,
    len_bytes: usize,
) -> Result<HostCopy, BackendError> {
    let kept = {
        let mut kept = spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().position(|memory| memory.len_bytes == len_bytes);
        fits.map(|at| kept.swap_remove(at))
    };
    let memory = kept.map_or_else(|| HostMemory::new(session, len_bytes), Ok)?;
    let copying = || format!("copying {len_bytes} bytes to the host");
    // SAFETY: the caller's, and the memory is as long and kept until the copy was waited for.
    session.call(copying, |stream| unsafe {
        sys::cuMemcpyDtoHAsync_v2(memory.address.cast(), from, len_bytes, stream)
    })?;
    // SAFETY: the session's stream lives as long as it.
    unsafe { memory.event.record(session.stream()) }?;
    Ok(HostCopy { memory: Some(memory), len_bytes, spare: Arc::clone(spare) })
}

impl HostCopy {
    /// Waits for the bytes.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the driver's code, also for work before.
    pub fn wait(mut self) -> Result<Vec<u8>, BackendError> {
        let Some(memory) = &self.memory else {
            return Ok(Vec::new());
        };
        memory.event.wait()?;
        // SAFETY: so many bytes, which the copy that has just been waited for has written.
        let bytes = unsafe { std::slice::from_raw_parts(memory.address, self.len_bytes) }.to_vec();
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.extend(self.memory.take());
        drop(spare);
        Ok(bytes)
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            // The device may still write there. An error has no one to go to here.
            let _ = memory.event.wait();
        }
    }
}
