//! Device memory.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cust::sys::{self, CUdeviceptr, CUresult};
use fusestep_launch::{BackendError, Buffer};
use fusestep_tensor::{DeviceOrder, DeviceSliceMut};

use crate::event::{Event, EventUse};
use crate::session::Session;
use crate::status::check;
use crate::{NAME, Result};

/// Memory of one device; freed when the last of buffer and graphs that refer to it goes.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    allocation: Arc<Allocation>,
    /// The events that order this session's work on the memory and that of others; `None` until it
    /// is handed over first.
    order: Option<Order>,
}

/// Events around the work of others on a buffer: they begin behind `ready` and record `done` behind
/// their work.
#[derive(Debug)]
struct Order {
    ready: Event,
    done: Event,
}

/// A range of device memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    session: Arc<Session>,
    /// 0 if it is empty; else aligned to 256 bytes, as the driver's allocations are.
    address: CUdeviceptr,
    len_bytes: usize,
}

impl DeviceBuffer {
    /// Zeroed memory.
    pub(crate) fn zeroed(session: &Arc<Session>, len_bytes: usize) -> Result<Self, BackendError> {
        let mut allocation = Allocation { session: Arc::clone(session), address: 0, len_bytes: 0 };
        if len_bytes > 0 {
            session.enter()?;
            let mut address = 0;
            // SAFETY: writes one address; the context is current.
            let status = unsafe { sys::cuMemAlloc_v2(&mut address, len_bytes) };
            if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(BackendError::OutOfMemory { backend: NAME, len_bytes });
            }
            check(status, || format!("allocating {len_bytes} bytes"))?;
            // From here on the memory is the allocation's, which frees it if the next call fails.
            allocation.address = address;
            allocation.len_bytes = len_bytes;
        }
        let mut buffer = Self { allocation: Arc::new(allocation), order: None };
        buffer.zero()?;
        Ok(buffer)
    }

    /// Sets all bytes to 0, in the order of the stream.
    pub(crate) fn zero(&mut self) -> Result<()> {
        let (address, len_bytes) = (self.address(), self.len_bytes());
        if len_bytes == 0 {
            return Ok(());
        }
        let zeroing = || format!("zeroing {len_bytes} bytes");
        // SAFETY: the range is the allocation's.
        self.allocation
            .session
            .call(zeroing, |stream| unsafe { sys::cuMemsetD8Async(address, 0, len_bytes, stream) })
    }

    /// Lets others work on the memory, behind the work that is enqueued by now.
    pub(crate) fn hand_over(&mut self) -> Result<()> {
        let session = &self.allocation.session;
        if self.order.is_none() {
            self.order = Some(Order {
                ready: Event::new(session, EventUse::Order)?,
                done: Event::new(session, EventUse::Order)?,
            });
        }
        match &self.order {
            // SAFETY: the session's stream lives as long as it.
            Some(order) => unsafe { order.ready.record(session.stream()) },
            None => Ok(()),
        }
    }

    /// Lets work that is enqueued from now on wait for the work of others on the memory.
    pub(crate) fn take_back(&mut self) -> Result<()> {
        match &self.order {
            // SAFETY: as above.
            Some(order) => unsafe { order.done.hold(self.allocation.session.stream()) },
            None => Ok(()),
        }
    }

    /// Copies from another buffer of the session, in the order of the stream.
    pub(crate) fn copy_from(
        &mut self,
        offset_bytes: usize,
        from: &Self,
        from_offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<()> {
        let source = from.range(from_offset_bytes, len_bytes)?;
        let range = self.range(offset_bytes, len_bytes)?;
        if range.is_empty() {
            return Ok(());
        }
        let copying = || format!("copying {len_bytes} bytes within the device");
        // SAFETY: both ranges lie in live allocations, which are freed behind what is enqueued, and
        // do not overlap: this one is borrowed alone.
        self.allocation.session.call(copying, |stream| unsafe {
            sys::cuMemcpyDtoDAsync_v2(range.start, source.start, len_bytes, stream)
        })
    }

    /// The buffer, if it is one of this session.
    pub(crate) fn of_mut<'a>(
        session: &Arc<Session>,
        buffer: &'a mut dyn Buffer,
    ) -> Result<&'a mut Self, BackendError> {
        buffer
            .as_any_mut()
            .downcast_mut::<Self>()
            .filter(|own| Arc::ptr_eq(&own.allocation.session, session))
            .ok_or(BackendError::ForeignBuffer { backend: NAME })
    }

    /// The allocation, which keeps the memory.
    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    /// Sets 8 bytes, in the order of what is enqueued and without waiting for it.
    pub(crate) fn set_f64(&mut self, offset_bytes: usize, value: f64) -> Result<()> {
        let range = self.range(offset_bytes, size_of::<f64>())?;
        let session = &self.allocation.session;
        session.enter()?;
        let bits = value.to_bits();
        for (address, word) in [(range.start, bits as u32), (range.start + 4, (bits >> 32) as u32)]
        {
            // SAFETY: `range` lies in the allocation and starts at a multiple of 8, as do all
            // offsets that are given.
            let status = unsafe { sys::cuMemsetD32Async(address, word, 1, session.stream()) };
            check(status, || "setting a value on the device".to_owned())?;
        }
        Ok(())
    }

    /// The buffer, if it is one of this session.
    pub(crate) fn of<'a>(
        session: &Arc<Session>,
        buffer: &'a dyn Buffer,
    ) -> Result<&'a Self, BackendError> {
        buffer
            .as_any()
            .downcast_ref::<Self>()
            .filter(|own| Arc::ptr_eq(&own.allocation.session, session))
            .ok_or(BackendError::ForeignBuffer { backend: NAME })
    }

    /// The address of the buffer; 0 if it is empty.
    pub(crate) fn address(&self) -> u64 {
        self.allocation.address
    }

    pub(crate) fn write(&mut self, offset_bytes: usize, bytes: &[u8]) -> Result<()> {
        let range = self.range(offset_bytes, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        let (session, len_bytes) = (&self.allocation.session, bytes.len());
        let copying = || format!("copying {len_bytes} bytes to the device");
        // SAFETY: `range` lies in the allocation; `bytes` is borrowed until the copy is done, which
        // is waited for below.
        let copied = session.call(copying, |stream| unsafe {
            sys::cuMemcpyHtoDAsync_v2(range.start, bytes.as_ptr().cast(), len_bytes, stream)
        });
        copied.and(session.synchronize())
    }

    pub(crate) fn read(&self, offset_bytes: usize, bytes: &mut [u8]) -> Result<()> {
        let range = self.range(offset_bytes, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        let (session, len_bytes) = (&self.allocation.session, bytes.len());
        let copying = || format!("copying {len_bytes} bytes from the device");
        // SAFETY: `range` lies in the allocation; `bytes` is borrowed until the copy is done, which
        // is waited for below.
        let copied = session.call(copying, |stream| unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), range.start, len_bytes, stream)
        });
        copied.and(session.synchronize())
    }

    /// The addresses of `len_bytes` bytes from `offset_bytes` on.
    pub(crate) fn range(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<Range<CUdeviceptr>, BackendError> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes() => {
                Ok(self.address() + offset_bytes as u64..self.address() + end as u64)
            }
            _ => Err(BackendError::OutOfBounds {
                backend: NAME,
                offset_bytes,
                len_bytes,
                found: self.len_bytes(),
            }),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.address != 0 && self.session.enter().is_ok() {
            // The driver waits for work that uses the memory. An error of earlier work has no one
            // to go to here. SAFETY: the address was allocated in `zeroed` and is freed
            // once.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl Buffer for DeviceBuffer {
    fn len_bytes(&self) -> usize {
        self.allocation.len_bytes
    }

    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    fn device_mut(&mut self) -> Option<DeviceSliceMut<'_>> {
        let order = match &self.order {
            None => return None,
            Some(order) => {
                DeviceOrder::Events { ready: order.ready.handle(), done: order.done.handle() }
            }
        };
        // SAFETY: the allocation and the events live as long as `self`, which is borrowed, in the
        // primary context; the session's own work on it comes before `ready` and, by `take_back`,
        // behind `done`.
        Some(unsafe {
            DeviceSliceMut::new(
                self.allocation.session.info.ordinal,
                self.allocation.address,
                self.allocation.len_bytes,
                order,
            )
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
