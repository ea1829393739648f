//! Launches on a stream of the device.

use std::ffi::c_void;
use std::num::NonZeroU32;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cust::sys;
use fusestep_kernels::ArgumentBlock;
use fusestep_launch::{
    Addresses, Backend, BackendError, Batch, Buffer, CONTROL_BYTES, Conclude, Graph, Launch,
    LaunchLimits, LaunchReport, ListBuffer, MAX_LISTS, Reduce, ResidentTable, SetValues, pack,
};

use crate::buffer::{Allocation, DeviceBuffer};
use crate::kernels::Kernels;
use crate::session::{Session, unavailable};
use crate::status::check;
use crate::update_sums::check_without_update_sums;
use crate::{DeviceInfo, GridSync, NAME};

/// Threads of a block, as the kernels are compiled for.
pub(crate) const BLOCK_THREADS: u32 = 512;

/// CUDA's limit on the grid's first dimension.
const GRID_MAX: u32 = i32::MAX as u32;

/// Runs kernels on a CUDA device.
///
/// A launch returns when it is enqueued; a fault of the device shows in a later call, at the latest
/// in [`Backend::synchronize`]. Methods may be called from any thread.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) session: Arc<Session>,
    /// Shared with graphs, which run what is loaded here.
    pub(crate) kernels: Arc<Mutex<Kernels>>,
    /// What a graph that is being recorded refers to.
    recorded: Mutex<Option<Vec<Arc<Allocation>>>>,
    limits: LaunchLimits,
    wave_chunks: Option<NonZeroU32>,
    grid_sync: GridSync,
}

impl CudaBackend {
    /// Opens device `ordinal` with the limits that it and its driver offer.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if there is no driver, no such device, or one too old for the
    /// PTX; [`BackendError::Device`] with the driver's code if the device cannot be opened.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        let session = Session::open(ordinal)?;
        let limits = LaunchLimits::with_argument_bytes(session.info.argument_bytes);
        let session = Arc::new(session);
        Ok(Self {
            grid_sync: session.info.grid_sync,
            kernels: Arc::new(Mutex::new(Kernels::new(&session))),
            recorded: Mutex::new(None),
            session,
            limits,
            wave_chunks: None,
        })
    }

    /// This backend with other limits; they change the plan, not the bits.
    pub fn with_limits(mut self, limits: LaunchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// This backend with waves of at most this many chunks; they change the time, not the bits.
    pub fn with_wave_chunks(mut self, wave_chunks: NonZeroU32) -> Self {
        self.wave_chunks = Some(wave_chunks);
        self
    }

    /// This backend without grids that wait for themselves; it changes the launches, not the bits.
    pub fn without_grid_sync(mut self) -> Self {
        self.grid_sync = GridSync::Missing;
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

    /// The address of so many slots for sums.
    pub(crate) fn slots(&self, count: u64) -> Result<u64, BackendError> {
        self.session.enter()?;
        let mut kernels = self.kernels();
        let address = kernels.slots.at_least(&self.session, count)?;
        if let Some(allocation) = kernels.slots.allocation() {
            self.keep(allocation);
        }
        Ok(address)
    }

    pub(crate) fn asked_wave_chunks(&self) -> Option<NonZeroU32> {
        self.wave_chunks
    }

    pub(crate) fn grid_sync(&self) -> GridSync {
        self.grid_sync
    }

    /// Blocks of a function that the device holds at once.
    fn resident_blocks(&self, function: sys::CUfunction) -> Result<u32, BackendError> {
        let mut blocks = 0;
        // SAFETY: writes one integer; the function belongs to a loaded module.
        let status = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                BLOCK_THREADS as i32,
                0,
            )
        };
        check(status, || "asking how many blocks fit".to_owned())?;
        let per_multiprocessor = u32::try_from(blocks).unwrap_or(0);
        Ok((per_multiprocessor * self.session.info.multiprocessors).max(1))
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
        let buffer = DeviceBuffer::of(&self.session, buffer)?;
        self.keep(buffer.allocation());
        Ok(buffer)
    }

    /// Where a control block lies.
    pub(crate) fn control_address(&self, control: &dyn Buffer) -> Result<u64, BackendError> {
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
    /// The caller has checked that everything the arguments refer to lies in buffers that are
    /// borrowed until the launch is enqueued; buffers are freed only after the driver has
    /// waited for it.
    pub(crate) fn enqueue(
        &self,
        entry: Entry,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), BackendError> {
        let block = entry.block;
        self.session.enter()?;
        let mut kernels = self.kernels();
        let function = kernels.function(entry.stem, entry.entry, block)?;
        let blocks = match entry.grid {
            Grid::Independent(blocks) => blocks,
            Grid::Cooperative { at_most } => self.resident_blocks(function)?.min(at_most),
        };
        let bytes = bytemuck::cast_slice_mut(kernels.block.as_mut_slice());
        write(bytes);
        let mut parameters: [*mut c_void; 1] = [bytes.as_mut_ptr().cast()];
        let stream = self.session.stream();
        let status = match entry.grid {
            // SAFETY: `function` takes one parameter of `block.len_bytes()` bytes, of which `bytes`
            // has at least as many; the call copies them. What they refer to lies in
            // live buffers, as the callers establish (`check_records`, `check_end`,
            // `Slots::at_least`).
            Grid::Independent(_) => unsafe {
                sys::cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    entry.threads,
                    1,
                    1,
                    0,
                    stream,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            },
            // SAFETY: as above; all blocks fit on the device at once (`resident_blocks`).
            Grid::Cooperative { .. } => unsafe {
                sys::cuLaunchCooperativeKernel(
                    function,
                    blocks,
                    1,
                    1,
                    entry.threads,
                    1,
                    1,
                    0,
                    stream,
                    parameters.as_mut_ptr(),
                )
            },
        };
        check(status, || {
            let entry = fusestep_kernels::entry(entry.entry, block);
            format!("launching `{entry}` with {blocks} blocks")
        })
    }

    /// Refuses a batch whose arguments no launch carries.
    pub(crate) fn check_arguments(&self, len_bytes: usize) -> Result<(), BackendError> {
        let most = self.session.info.argument_bytes;
        if len_bytes <= most {
            return Ok(());
        }
        Err(unavailable(format!(
            "a batch has {len_bytes} argument bytes, this device takes {most}; plan with the \
             limits of the backend"
        )))
    }
}

/// One launch: which function, what its arguments are, and its grid.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) stem: &'static str,
    pub(crate) entry: &'static str,
    pub(crate) block: ArgumentBlock,
    pub(crate) threads: u32,
    pub(crate) grid: Grid,
}

/// How the blocks of a launch run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Grid {
    /// So many, in any order.
    Independent(u32),
    /// As many as the device holds at once, so that they can wait for each other.
    Cooperative {
        /// More have no work.
        at_most: u32,
    },
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
        check_without_update_sums(&launch)?;
        check_without_tensor_sums(&launch)?;
        let mut addresses = [0; MAX_LISTS];
        for (address, list) in addresses.iter_mut().zip(launch.lists.iter()) {
            *address = self.device_buffer(list.buffer.as_ref())?.address();
        }
        let addresses = Addresses {
            lists: &addresses[..launch.lists.len()],
            control: match launch.control {
                Some(control) => self.control_address(control)?,
                None => 0,
            },
            update_sums: 0,
        };
        // All batches are checked before the first is launched.
        for batch in launch.batches {
            check_records((launch.lists, launch.firsts), launch.offsets, batch)?;
            self.check_arguments(argument_bytes(&launch, batch))?;
        }
        if let Some(normed) = launch.kernel.normed() {
            self.launch_normed(&launch, normed, addresses)?;
            return Ok(LaunchReport::of(launch.batches));
        }
        for batch in launch.batches.iter().filter(|batch| batch.chunks > 0) {
            let entry = Entry {
                stem: launch.kernel.stem(),
                entry: launch.kernel.entry(),
                block: ArgumentBlock::ByValue,
                threads: BLOCK_THREADS,
                grid: Grid::Independent(batch.chunks),
            };
            self.enqueue(entry, &mut |bytes| {
                pack(&launch, batch, addresses, bytes);
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

    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[SetValues],
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(Some(Box::new(self.place_launch(launch, values)?)))
    }

    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        self.enqueue_table(&launch, table)
    }

    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<(), BackendError> {
        self.set_lr_of(table, lr)
    }

    fn place_reduction(
        &self,
        reduce: &Reduce<'_>,
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(Some(Box::new(self.place_reads(reduce)?)))
    }

    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        self.enqueue_reads(&reduce, table)
    }

    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        Ok(Box::new(self.record(enqueue)?))
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.session.enter()?;
        self.kernels().take_skipped()
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.session.synchronize()
    }
}

pub(crate) fn argument_bytes(launch: &Launch<'_>, batch: &Batch) -> usize {
    launch
        .argument_layout()
        .bytes(batch.records.len(), batch.classes.len())
}

/// Refuses a batch that is too large for one grid or that reaches beyond a buffer: a device would
/// notice late, or not at all. `firsts` are those of [`Launch::firsts`].
pub(crate) fn check_records(
    (lists, firsts): (&[ListBuffer], &[u64]),
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
        let element = offsets
            .get(record.tensor as usize)
            .copied()
            .unwrap_or(u64::MAX)
            .saturating_add(record.first_element);
        for (index, list) in lists.iter().enumerate() {
            let element_bytes = list.dtype().len_bytes() as u64;
            let first = firsts.get(index).copied().unwrap_or(0);
            let place = element.wrapping_sub(first);
            let end = place
                .saturating_add(record.numel)
                .saturating_mul(element_bytes);
            if end > list.buffer.len_bytes() as u64 {
                return Err(BackendError::OutOfBounds {
                    backend: NAME,
                    offset_bytes: saturate(place.saturating_mul(element_bytes)),
                    len_bytes: saturate(record.numel.saturating_mul(element_bytes)),
                    found: list.buffer.len_bytes(),
                });
            }
        }
    }
    Ok(())
}

/// Refuses sums that others have taken: the kernels here take those of whole tensors themselves.
pub(crate) fn check_without_tensor_sums(launch: &Launch<'_>) -> Result<(), BackendError> {
    match launch.tensor_sums {
        None => Ok(()),
        Some(_) => Err(unavailable(format!(
            "`{}`: expected whole tensors, found parts and the sums over the whole of them; give \
             whole tensors to ranks (`Ownership::Tensors`)",
            launch.kernel.entry()
        ))),
    }
}

fn saturate(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
