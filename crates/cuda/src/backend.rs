//! Launches on a stream of the device.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cust::sys;
use fusestep_kernels::ArgumentBlock;
use fusestep_launch::{
    Backend, BackendError, Batch, Buffer, CONTROL_BYTES, Conclude, Launch, LaunchLimits,
    LaunchReport, ListBuffer, MAX_LISTS, Reduce, pack,
};

use crate::buffer::DeviceBuffer;
use crate::kernels::Kernels;
use crate::session::{Session, unavailable};
use crate::status::check;
use crate::{DeviceInfo, NAME};

/// Threads of a block, as the kernels are compiled for.
const BLOCK_THREADS: u32 = 512;

/// CUDA's limit on the grid's first dimension.
const GRID_MAX: u32 = i32::MAX as u32;

/// Runs kernels on a CUDA device.
///
/// A launch returns when it is enqueued; a fault of the device shows in a later call, at the latest in
/// [`Backend::synchronize`]. Methods may be called from any thread.
#[derive(Debug)]
pub struct CudaBackend {
    session: Arc<Session>,
    kernels: Mutex<Kernels>,
    limits: LaunchLimits,
}

impl CudaBackend {
    /// Opens device `ordinal` with the limits that it and its driver offer.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if there is no driver, no such device, or one too old for the PTX;
    /// [`BackendError::Device`] with the driver's code if the device cannot be opened.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        let session = Session::open(ordinal)?;
        let limits = LaunchLimits::with_argument_bytes(session.info.argument_bytes);
        Ok(Self {
            session: Arc::new(session),
            kernels: Mutex::new(Kernels::new()),
            limits,
        })
    }

    /// The same backend with other limits; they change the plan, not the bits.
    pub fn with_limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// What the device and its driver offer.
    pub fn device_info(&self) -> &DeviceInfo {
        &self.session.info
    }

    /// A buffer of this device.
    pub(crate) fn device_buffer<'b>(
        &self,
        buffer: &'b dyn Buffer,
    ) -> Result<&'b DeviceBuffer, BackendError> {
        DeviceBuffer::of(&self.session, buffer)
    }

    /// Where a control block lies.
    fn control_address(&self, control: &dyn Buffer) -> Result<u64, BackendError> {
        let found = control.len_bytes();
        if found < CONTROL_BYTES {
            return Err(BackendError::OutOfBounds {
                backend: NAME,
                offset_bytes: 0,
                len_bytes: CONTROL_BYTES,
                found,
            });
        }
        Ok(self.device_buffer(control)?.address())
    }

    /// Enqueues one launch, whose arguments `write` writes.
    ///
    /// The caller has checked that everything the arguments refer to lies in buffers that are borrowed until the launch is
    /// enqueued; buffers are freed only after the driver has waited for it.
    pub(crate) fn enqueue(
        &self,
        entry: Entry,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), BackendError> {
        let block = self.block_for(entry.argument_bytes)?;
        self.session.enter()?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let function = kernels.function(entry.stem, entry.entry, block)?;
        let bytes = bytemuck::cast_slice_mut(kernels.block.as_mut_slice());
        write(bytes);
        let mut parameters: [*mut c_void; 1] = [bytes.as_mut_ptr().cast()];
        // SAFETY: `function` takes one parameter of `block.len_bytes()` bytes, of which `bytes` has at least as many; the call
        // copies them. What they refer to lies in live buffers, as the callers establish (`check_records`, `check_end`).
        let status = unsafe {
            sys::cuLaunchKernel(
                function,
                entry.blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.session.stream(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(status, || {
            format!(
                "launching `{}` with {} blocks",
                fusestep_kernels::entry(entry.entry, block),
                entry.blocks
            )
        })
    }

    /// The smallest argument block that carries the batch here. A small batch takes the small block whatever the limits: the
    /// driver copies all of a block for each launch.
    pub(crate) fn block_for(&self, len_bytes: usize) -> Result<ArgumentBlock, BackendError> {
        let most = self.session.info.argument_bytes;
        ArgumentBlock::for_bytes(len_bytes)
            .filter(|block| block.len_bytes() <= most)
            .ok_or_else(|| {
                unavailable(format!(
                    "a batch has {len_bytes} argument bytes, this device takes {most}; plan with the limits of the backend"
                ))
            })
    }
}

/// One launch: which function, how long its arguments are, and its grid.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) stem: &'static str,
    pub(crate) entry: &'static str,
    pub(crate) argument_bytes: usize,
    pub(crate) blocks: u32,
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn limits(&self) -> LaunchLimits {
        self.limits
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        Ok(Box::new(DeviceBuffer::zeroed(&self.session, len_bytes)?))
    }

    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        DeviceBuffer::of(&self.session, buffer)?;
        buffer
            .as_any_mut()
            .downcast_mut::<DeviceBuffer>()
            .ok_or(BackendError::ForeignBuffer { backend: NAME })?
            .write(offset_bytes, bytes)
    }

    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        DeviceBuffer::of(&self.session, buffer)?.read(offset_bytes, bytes)
    }

    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let mut addresses = [0; MAX_LISTS];
        for (address, list) in addresses.iter_mut().zip(launch.lists.iter()) {
            *address = DeviceBuffer::of(&self.session, list.buffer.as_ref())?.address();
        }
        let addresses = &addresses[..launch.lists.len()];
        let control = match launch.control {
            Some(control) => self.control_address(control)?,
            None => 0,
        };
        // All batches are checked before the first is launched.
        for batch in launch.batches {
            check_records(launch.lists, launch.offsets, batch)?;
            self.block_for(argument_bytes(&launch, batch))?;
        }
        for batch in launch.batches.iter().filter(|batch| batch.chunks > 0) {
            let entry = Entry {
                stem: launch.kernel.stem(),
                entry: launch.kernel.entry(),
                argument_bytes: argument_bytes(&launch, batch),
                blocks: batch.chunks,
            };
            self.enqueue(entry, &mut |bytes| {
                pack(&launch, batch, addresses, control, bytes);
            })?;
        }
        Ok(LaunchReport::of(launch.batches))
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        self.enqueue_reduction(reduce)
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        self.enqueue_conclusion(conclude)
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.session.synchronize()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Modules must not go while their code runs. After a fault of the device nothing runs, and nothing can be unloaded either.
        if self.session.synchronize().is_ok() {
            self.kernels
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .unload();
        }
    }
}

fn argument_bytes(launch: &Launch<'_>, batch: &Batch) -> usize {
    launch
        .kernel
        .argument_layout()
        .bytes(batch.records.len(), batch.classes.len())
}

/// Refuses a batch that is too large for one grid or that reaches beyond a buffer: a device would notice late, or not at all.
pub(crate) fn check_records(
    lists: &[ListBuffer],
    offsets: &[u64],
    batch: &Batch,
) -> Result<(), BackendError> {
    if batch.chunks > GRID_MAX {
        return Err(unavailable(format!(
            "a batch has {} chunks, a launch takes {GRID_MAX}; plan with the limits of the backend",
            batch.chunks
        )));
    }
    for record in &batch.records {
        let first = offsets
            .get(record.tensor as usize)
            .copied()
            .unwrap_or(u64::MAX)
            .saturating_add(record.first_element);
        for list in lists {
            let element_bytes = list.dtype().len_bytes() as u64;
            let end = first
                .saturating_add(record.numel)
                .saturating_mul(element_bytes);
            if end > list.buffer.len_bytes() as u64 {
                return Err(BackendError::OutOfBounds {
                    backend: NAME,
                    offset_bytes: saturate(first.saturating_mul(element_bytes)),
                    len_bytes: saturate(record.numel.saturating_mul(element_bytes)),
                    found: list.buffer.len_bytes(),
                });
            }
        }
    }
    Ok(())
}

fn saturate(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
