//! Copies to the host that nobody waits for until they are asked for.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cust::sys;
use fusestep_launch::{BackendError, Buffer};

use crate::Result;
use crate::buffer::DeviceBuffer;
use crate::event::{Event, EventUse};
use crate::session::Session;

/// Memory of the host that a device writes to, with the event behind its last copy.
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
    fn new(session: &Arc<Session>, len_bytes: usize) -> Result<Self, BackendError> {
        let event = Event::new(session, EventUse::Order)?;
        let mut address = ptr::null_mut();
        let allocating = || format!("allocating {len_bytes} bytes of the host's for a device");
        // SAFETY: writes one address; the context is current.
        session.call(allocating, |_| unsafe { sys::cuMemAllocHost_v2(&mut address, len_bytes) })?;
        Ok(Self { address: address.cast(), len_bytes, event, session: Arc::clone(session) })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.session.enter().is_ok() {
            // SAFETY: allocated in `new` and freed once; `HostCopy` has waited for the copy into
            // it, or the driver does. An error has no one to go to here.
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
    let kept = {
        let mut kept = spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = kept.iter().position(|memory| memory.len_bytes == len_bytes);
        fits.map(|at| kept.swap_remove(at))
    };
    let memory = kept.map_or_else(|| HostMemory::new(session, len_bytes), Ok)?;
    let copying = || format!("copying {len_bytes} bytes to the host");
    // SAFETY: both ranges have that length; the memory is kept until the copy was waited for.
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
