//! A CUDA device at work, and what all its launches share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep_launch::{BackendError, Buffer, CONTROL_BYTES, Launch, LaunchLimits, MAX_LISTS};

use crate::buffer::{Allocation, DeviceBuffer};
use crate::host_copy::{self, HostCopy, Spare};
use crate::kernels::Kernels;
use crate::loaded_entry::EntryCode;
use crate::session::Session;
use crate::{DeviceInfo, NAME};

/// Elements of a full chunk of a kernel that takes no sums over its chunks. In chunks of 65,536
/// elements ResNet-50 is 508 blocks; an H100 holds 528 of 256 threads at once, and waits a third of
/// the time for the longest. In these chunks it is 1,667 blocks, and waits 2.6 % of the time.
/// `cargo xtask waves` counts other models. A block still has 64 elements for each thread.
const CHUNK_ELEMENTS: u32 = 16_384;

/// Runs kernels on a CUDA device.
///
/// A launch returns when it is enqueued; a fault of the device shows in a later call, at the latest
/// in [`fusestep_launch::Memory::synchronize`]. Methods may be called from any thread.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) session: Arc<Session>,
    /// Shared with graphs, which run what is loaded here.
    pub(crate) kernels: Arc<Mutex<Kernels>>,
    /// The memory that a graph refers to, while it is being recorded.
    recorded: Mutex<Option<Vec<Arc<Allocation>>>>,
    /// Addresses of tensors that a framework lends, for the launch under way; kept for its memory.
    pub(crate) borrowed: Mutex<Vec<u64>>,
    /// Host memory for copies that are waited for later.
    pub(crate) spare: Spare,
    pub(crate) limits: LaunchLimits,
}

impl CudaBackend {
    /// Opens device `ordinal` with the limits that it and its driver offer.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if there is no driver, no such device, or one too old for the
    /// PTX; [`BackendError::Device`] with the driver's code if the device cannot be opened.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        Ok(Self::of(Session::open(ordinal)?))
    }

    /// A backend on a device that is at work.
    pub(crate) fn of(session: Session) -> Self {
        let limits = LaunchLimits {
            chunk_elements: CHUNK_ELEMENTS,
            keeps_tables: true,
            ..LaunchLimits::with_argument_bytes(session.info.argument_bytes)
        };
        let session = Arc::new(session);
        Self {
            kernels: Arc::new(Mutex::new(Kernels::new(&session))),
            recorded: Mutex::new(None),
            borrowed: Mutex::default(),
            spare: Spare::default(),
            session,
            limits,
        }
    }

    /// This backend with other limits; they change the plan, not the bits.
    pub fn with_limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    pub(crate) fn kernels(&self) -> MutexGuard<'_, Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn recorded(&self) -> MutexGuard<'_, Option<Vec<Arc<Allocation>>>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a graph that is being recorded keep this memory.
    pub(crate) fn keep(&self, allocation: &Arc<Allocation>) {
        if let Some(kept) = self.recorded().as_mut() {
            kept.push(Arc::clone(allocation));
        }
    }

    /// The address of `count` rows for sums.
    pub(crate) fn rows(&self, count: u64) -> Result<u64, BackendError> {
        self.session.enter()?;
        let mut kernels = self.kernels();
        let address = kernels.rows.at_least(&self.session, count)?;
        if let Some(allocation) = kernels.rows.allocation() {
            self.keep(allocation);
        }
        Ok(address)
    }

    /// The properties of the device and its driver.
    pub fn device_info(&self) -> &DeviceInfo {
        &self.session.info
    }

    /// A buffer of this device.
    pub(crate) fn device_buffer<'b>(
        &self,
        buffer: &'b dyn Buffer,
    ) -> Result<&'b DeviceBuffer, BackendError> {
        let buffer = DeviceBuffer::of(&self.session, buffer)?;
        self.keep(buffer.allocation());
        Ok(buffer)
    }

    /// The address of a buffer of this device.
    pub(crate) fn address(&self, buffer: &dyn Buffer) -> Result<u64, BackendError> {
        Ok(self.device_buffer(buffer)?.address())
    }

    /// The addresses of a launch's lists.
    pub(crate) fn list_addresses(
        &self,
        launch: &Launch<'_>,
    ) -> Result<[u64; MAX_LISTS], BackendError> {
        let mut addresses = [0; MAX_LISTS];
        for (address, list) in addresses.iter_mut().zip(launch.lists.iter()) {
            *address = self.address(list.buffer.as_ref())?;
        }
        Ok(addresses)
    }

    /// The address of a control block; 0 if there is none.
    pub(crate) fn control_address(
        &self,
        control: Option<&dyn Buffer>,
    ) -> Result<u64, BackendError> {
        let Some(control) = control else {
            return Ok(0);
        };
        let found = control.len_bytes();
        if found < CONTROL_BYTES {
            return Err(BackendError::OutOfBounds {
                backend: NAME,
                offset_bytes: 0,
                len_bytes: CONTROL_BYTES,
                found,
            });
        }
        self.address(control)
    }

    /// Begins to copy the first `len_bytes` bytes of a buffer to the host, behind what is enqueued
    /// here by now. The host goes on; [`HostCopy::wait`] waits for the copy and for nothing behind.
    ///
    /// # Errors
    /// As [`fusestep_launch::Memory::read`].
    /// # Cost
    /// Memory that the device writes to, kept for the next call of this length.
    pub fn begin_read(
        &self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<HostCopy, BackendError> {
        host_copy::begin(&self.session, &self.spare, buffer, len_bytes)
    }

    /// The entries that were launched until now, each with the code that the driver was handed. An
    /// entry is loaded when it is launched first.
    pub fn loaded_entries(&self) -> Vec<(&'static str, EntryCode)> {
        self.kernels().loaded().collect()
    }
}
