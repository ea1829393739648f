//! Launches on a stream of the device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep_launch::{
    Accumulate, Addresses, Backend, BackendError, Batch, Buffer, CONTROL_BYTES, Conclude,
    FoldLeaves, Graph, GroupValues, Launch, LaunchLimits, LaunchReport, LeafSquares, MAX_SUMS,
    Reduce, ResidentTable, SquareSum, pack,
};

use crate::buffer::{Allocation, DeviceBuffer};
use crate::checks::{argument_bytes, check_records};
use crate::entry::{Entry, threads_for};
use crate::kernels::Kernels;
use crate::loaded_entry::EntryCode;
use crate::session::Session;
use crate::update_sums::check_without_update_sums;
use crate::{
    DeviceInfo, NAME, Result, accumulate, checks, graph, leaves, normed, reduce, resident,
    tensor_sums,
};

/// Elements of a full chunk of a kernel that takes no sums over its chunks. In chunks of 65,536
/// ResNet-50 is 508 blocks, and on an H100 that holds 528 of 256 threads at once it waits a third
/// of the time for the longest of them; in these it is 1,667, and 2.6 %. `cargo xtask waves` counts
/// others. A block still has 64 elements for each thread.
const CHUNK_ELEMENTS: u32 = 16_384;

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
    /// Addresses of tensors that a framework lends, for the launch under way; kept for its memory.
    pub(crate) borrowed: Mutex<Vec<u64>>,
    limits: LaunchLimits,
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

    /// On a device that is at work.
    pub(crate) fn of(session: Session) -> Self {
        let limits = LaunchLimits {
            chunk_elements: CHUNK_ELEMENTS,
            ..LaunchLimits::with_argument_bytes(session.info.argument_bytes)
        };
        let session = Arc::new(session);
        Self {
            kernels: Arc::new(Mutex::new(Kernels::new(&session))),
            recorded: Mutex::new(None),
            borrowed: Mutex::default(),
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

    /// The address of so many rows for sums.
    pub(crate) fn rows(&self, count: u64) -> Result<u64, BackendError> {
        self.session.enter()?;
        let mut kernels = self.kernels();
        let address = kernels.rows.at_least(&self.session, count)?;
        if let Some(allocation) = kernels.rows.allocation() {
            self.keep(allocation);
        }
        Ok(address)
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

    /// Where a buffer of this device lies.
    pub(crate) fn address(&self, buffer: &dyn Buffer) -> Result<u64, BackendError> {
        Ok(self.device_buffer(buffer)?.address())
    }

    /// Where a control block lies; 0 if there is none.
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

    /// Enqueues all batches of a launch, which have been checked; `pack` writes the arguments of
    /// one.
    pub(crate) fn enqueue_batches(
        &self,
        launch: &Launch<'_>,
        pack: &dyn Fn(&Batch, &mut [u8]),
    ) -> Result<LaunchReport, BackendError> {
        if let Some(normed) = launch.kernel.normed() {
            normed::launch(self, launch, normed, pack)?;
            return Ok(LaunchReport::of(launch.batches));
        }
        for batch in launch.batches.iter().filter(|batch| batch.chunks > 0) {
            let entry = Entry {
                stem: launch.kernel.stem(),
                entry: launch.kernel.entry(),
                threads: threads_for(batch),
                blocks: batch.chunks,
            };
            entry.enqueue(self, &mut |bytes| pack(batch, bytes))?;
        }
        Ok(LaunchReport::of(launch.batches))
    }

    /// The entries that were launched until now, each with what the driver was handed for it. An
    /// entry is loaded when it is launched first.
    pub fn loaded_entries(&self) -> Vec<(&'static str, EntryCode)> {
        self.kernels().loaded().collect()
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self) -> Option<u32> {
        Some(self.session.info.ordinal)
    }

    fn limits(&self) -> LaunchLimits {
        self.limits
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        Ok(Box::new(DeviceBuffer::zeroed(&self.session, len_bytes)?))
    }

    fn write(&self, buffer: &mut dyn Buffer, offset_bytes: usize, bytes: &[u8]) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.write(offset_bytes, bytes)
    }

    fn copy(
        &self,
        (from, from_offset_bytes): (&dyn Buffer, usize),
        (to, to_offset_bytes): (&mut dyn Buffer, usize),
        len_bytes: usize,
    ) -> Result<()> {
        let from = (DeviceBuffer::of(&self.session, from)?, from_offset_bytes);
        let to = DeviceBuffer::of_mut(&self.session, to)?;
        to.copy_from(to_offset_bytes, from, len_bytes)
    }

    fn accumulate(&self, accumulate: Accumulate<'_>) -> Result<()> {
        accumulate::enqueue(self, accumulate)
    }

    fn hand_over(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.hand_over()
    }

    fn take_back(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.take_back()
    }

    fn read(&self, buffer: &dyn Buffer, offset_bytes: usize, bytes: &mut [u8]) -> Result<()> {
        DeviceBuffer::of(&self.session, buffer)?.read(offset_bytes, bytes)
    }

    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        check_without_update_sums(&launch)?;
        let addresses = leaves::list_addresses(self, &launch)?;
        let addresses = Addresses {
            lists: &addresses[..launch.lists.len()],
            control: self.control_address(launch.control)?,
        };
        // All batches are checked before the first is launched.
        for batch in launch.batches {
            check_records((launch.lists, launch.firsts), launch.offsets, batch)?;
            checks::check_arguments(self, argument_bytes(&launch, batch))?;
        }
        if let (Some(normed), Some(sums)) = (launch.kernel.normed(), launch.tensor_sums) {
            tensor_sums::launch_with_sums(self, &launch, (normed, sums))?;
            return Ok(LaunchReport::of(launch.batches));
        }
        self.enqueue_batches(&launch, &|batch, bytes| {
            pack(&launch, batch, addresses, bytes);
        })
    }

    fn leaf_squares(&self, leaves: LeafSquares<'_>, sums: &mut [SquareSum]) -> Result<()> {
        leaves::squares(self, leaves, sums)
    }

    fn leaf_squares_into(
        &self,
        leaves: LeafSquares<'_>,
        into: (&mut dyn Buffer, u64),
    ) -> Result<()> {
        leaves::squares_into(self, leaves, into)
    }

    fn fold_leaves(&self, fold: FoldLeaves<'_>) -> Result<()> {
        leaves::enqueue_fold(self, fold)
    }

    fn zero(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.zero()
    }

    fn leaf_sums(&self, launch: &Launch<'_>, sums: &mut [[f64; MAX_SUMS]]) -> Result<()> {
        leaves::sums(self, launch, sums)
    }

    fn leaf_sums_into(&self, launch: &Launch<'_>, rows: (&mut dyn Buffer, u64)) -> Result<()> {
        tensor_sums::enqueue_leaf_sums(self, launch, rows)
    }

    fn place_leaf_sums(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
        rows: (&dyn Buffer, u64),
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(Some(Box::new(resident::place_leaves(self, launch, values, rows)?)))
    }

    fn leaf_sums_of_table(&self, launch: &Launch<'_>, table: &dyn ResidentTable) -> Result<()> {
        resident::launch::enqueue_leaves(self, launch, table)
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        reduce::reduce(self, reduce)
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        reduce::conclude(self, conclude)
    }

    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(Some(Box::new(resident::place_launch(self, launch, values)?)))
    }

    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        resident::launch::enqueue(self, &launch, table)
    }

    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<()> {
        resident::set_lr(self, table, lr)
    }

    fn place_reduction(
        &self,
        reduce: &Reduce<'_>,
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(Some(Box::new(resident::place_reads(self, reduce)?)))
    }

    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        resident::launch::enqueue_reads(self, &reduce, table)
    }

    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        Ok(Box::new(graph::record(self, enqueue)?))
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.session.enter()?;
        self.kernels().take_skipped()
    }

    fn synchronize(&self) -> Result<()> {
        self.session.synchronize()
    }
}
