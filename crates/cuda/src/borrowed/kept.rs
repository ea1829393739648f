//! One table of a launch on borrowed tensors, and what the device has of it.

use std::sync::{Arc, Mutex};

use fusestep_launch::{
    ArgumentLayout, BackendError, Batch, GROUP_BYTES, HEADER_BYTES, Launch, Reduce, STEPS_BYTES,
    WORKSPACE_BYTES, merged, pack_launch_of_table,
};

use super::{DeviceTensor, copy_number};
use crate::Result;
use crate::backend::CudaBackend;
use crate::buffer::DeviceBuffer;
use crate::entry::{BLOCK_THREADS, Entry, threads_for};
use crate::host_copy::HostMemory;
use crate::normed::{self, row_count, workspace};
use crate::recording::aside;
use crate::rows::Rows;
use crate::session::{Session, unavailable};

/// Byte of a group from which on it has the steps taken.
const STEP_AT: usize = 16;

/// Bytes of the learning rate, with which the steps begin.
const RATE_BYTES: usize = size_of::<f64>();

/// A table in the device's memory, with what it was made of.
#[derive(Debug)]
pub(crate) struct Kept {
    entry: &'static str,
    /// The batches of the launch, and all of them as one.
    source: Vec<Batch>,
    batch: Arc<Batch>,
    /// Rows of a kernel that takes sums over tensors, and their address.
    rows: Option<(Arc<Mutex<Rows>>, u64)>,
    /// Threads of a block, and blocks.
    grid: (u32, u32),
    /// Bytes of the steps, of which a reduction has none.
    steps_bytes: usize,
    /// Steps and table as the device has them, once it has counted what is enqueued.
    bytes: Vec<u8>,
    memory: Option<DeviceBuffer>,
    session: Arc<Session>,
    /// Host memory of copies, two in turn.
    uploads: [Option<HostMemory>; 2],
    arguments: Vec<u8>,
    /// Number of the tensors' places that the table has, and what else its head was made of.
    places: u64,
    head: Vec<u8>,
    /// Tables of recorded launches.
    recorded: Vec<Recorded>,
}

/// The table of a launch that a framework has recorded.
#[derive(Debug)]
struct Recorded {
    memory: DeviceBuffer,
    arguments: Vec<u8>,
}

/// Bytes of a table, and the layout by which they were packed.
pub(crate) struct Table {
    pub(crate) bytes: Vec<u8>,
    pub(crate) layout: ArgumentLayout,
}

impl Table {
    fn arguments(&self, address: u64) -> Vec<u8> {
        pack_launch_of_table(&self.bytes, self.layout, address)
    }
}

impl Kept {
    /// The table of a launch, without bytes yet.
    pub(crate) fn of_launch(backend: &CudaBackend, launch: &Launch<'_>) -> Result<Self> {
        let chunk_elements = launch.limits.chunk_elements;
        let batch = whole(launch.kernel.entry(), launch.batches, chunk_elements)?;
        let rows = match launch.kernel.normed() {
            Some(_) => Some(backend.kernels().place_rows(row_count(launch)?)?),
            None => None,
        };
        let grid = match rows {
            Some(_) => normed::shape(&batch),
            None => (threads_for(&batch), batch.chunks),
        };
        let entry = launch.kernel.entry();
        let mut kept = Self::of(backend, entry, launch.batches, batch, grid);
        kept.steps_bytes = STEPS_BYTES + kept.batch.groups.len() * GROUP_BYTES;
        kept.rows = rows;
        Ok(kept)
    }

    /// The table of a reduction, without bytes yet.
    pub(crate) fn of_reduction(backend: &CudaBackend, reduce: &Reduce<'_>) -> Result<Self> {
        let (kernel, batches) = (reduce.kernel, reduce.batches);
        let batch = whole(kernel.entry(), batches, kernel.chunk_elements())?;
        let grid = (threads_for(&batch), batch.chunks);
        Ok(Self::of(backend, kernel.entry(), batches, batch, grid))
    }

    fn of(
        backend: &CudaBackend,
        entry: &'static str,
        source: &[Batch],
        batch: Batch,
        grid: (u32, u32),
    ) -> Self {
        Self {
            entry,
            source: source.to_vec(),
            batch: Arc::new(batch),
            rows: None,
            grid,
            steps_bytes: 0,
            bytes: Vec::new(),
            memory: None,
            session: Arc::clone(&backend.session),
            uploads: [None, None],
            arguments: Vec::new(),
            places: 0,
            head: Vec::new(),
            recorded: Vec::new(),
        }
    }

    /// Whether it is the table of such a launch.
    pub(crate) fn is_of(&self, entry: &str, batches: &[Batch]) -> bool {
        self.entry == entry && self.source == batches
    }

    pub(crate) fn batch(&self) -> Arc<Batch> {
        Arc::clone(&self.batch)
    }

    pub(crate) fn is_recorded(&self) -> bool {
        !self.recorded.is_empty()
    }

    /// Whether the device has the tensors of these places, and such a head.
    pub(crate) fn has(&self, places: u64, head: &[u8]) -> bool {
        places != 0 && self.places == places && self.head == head
    }

    pub(crate) fn has_now(&mut self, places: u64, head: Vec<u8>) {
        (self.places, self.head) = (places, head);
    }

    /// Puts the place of the rows into the scalars of a table.
    pub(crate) fn write_workspace(&self, launch: &Launch<'_>, table: &mut [u8]) {
        if let Some((_, address)) = self.rows {
            let own = workspace(launch, 0, address).bytes();
            table[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&own);
        }
    }

    /// Leaves the learning rate as the device has it.
    pub(crate) fn keep_rate(&self, steps: &mut [u8]) {
        if let Some(own) = self.bytes.get(..RATE_BYTES) {
            steps[..RATE_BYTES].copy_from_slice(own);
        }
    }

    /// Has the device copy the learning rate from a tensor.
    pub(crate) fn take_rate(&self, rate: DeviceTensor) -> Result<()> {
        // The steps begin with it.
        copy_number(&self.session, rate, self.address())
    }

    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceBuffer::address)
    }

    /// The address of the table that steps outside of recordings are launched from.
    pub(crate) fn table_address(&self) -> u64 {
        self.address() + self.steps_bytes as u64
    }

    /// Brings what differs to the device, in the order of the stream; returns the bytes copied.
    pub(crate) fn refresh(
        &mut self,
        backend: &CudaBackend,
        steps: &[u8],
        table: Option<Table>,
    ) -> Result<u64, BackendError> {
        let Some(memory) = &self.memory else {
            let Some(table) = table else { return Ok(0) };
            self.place(backend, steps, &table)?;
            return Ok(self.bytes.len() as u64);
        };
        DeviceBuffer::of(&backend.session, memory)?;
        let mut copied = self.write(0, steps)?;
        if let Some(table) = table {
            copied += self.write(self.steps_bytes, &table.bytes)?;
            self.arguments = table.arguments(self.table_address());
        }
        Ok(copied)
    }

    /// Makes the memory and writes it; waits for the device.
    fn place(&mut self, backend: &CudaBackend, steps: &[u8], table: &Table) -> Result<()> {
        let bytes = [steps, &table.bytes].concat();
        let mut memory = DeviceBuffer::zeroed(&backend.session, bytes.len())?;
        memory.write(0, &bytes)?;
        self.arguments = table.arguments(memory.address() + steps.len() as u64);
        (self.memory, self.bytes) = (Some(memory), bytes);
        Ok(())
    }

    /// Writes the part of `bytes` that the device does not have at `at`.
    fn write(&mut self, at: usize, bytes: &[u8]) -> Result<u64, BackendError> {
        let own = &mut self.bytes[at..at + bytes.len()];
        let Some(first) = own.iter().zip(bytes).position(|(own, new)| own != new) else {
            return Ok(0);
        };
        let last = own.iter().zip(bytes).rposition(|(own, new)| own != new).unwrap_or(first);
        let changed = &bytes[first..=last];
        own[first..=last].copy_from_slice(changed);
        let to = self.address() + (at + first) as u64;
        self.uploads.swap(0, 1);
        let upload = match &mut self.uploads[0] {
            Some(upload) => upload,
            none => none.insert(HostMemory::new(&self.session, self.bytes.len())?),
        };
        // SAFETY: the range lies in the memory, which is as long as `bytes` of this table.
        unsafe { upload.begin_write(to, changed) }?;
        Ok(changed.len() as u64)
    }

    /// Makes the table of a launch that is recorded; returns its address. The steps stay as the
    /// device has counted them, and must else be those of the last step.
    pub(crate) fn record(
        &mut self,
        backend: &CudaBackend,
        steps: &[u8],
        table: Option<Table>,
    ) -> Result<u64, BackendError> {
        let Some(table) = table else { return Ok(self.table_address()) };
        if self.memory.is_none() {
            aside(backend, || self.place(backend, steps, &table))?;
        }
        self.follow_settings(backend, steps)?;
        let memory = aside(backend, || {
            let mut memory = DeviceBuffer::zeroed(&backend.session, table.bytes.len())?;
            memory.write(0, &table.bytes)?;
            Ok(memory)
        })?;
        let address = memory.address();
        self.recorded.push(Recorded { arguments: table.arguments(address), memory });
        Ok(address)
    }

    /// Brings settings to the device that have changed since the last step, beside a recording.
    fn follow_settings(&mut self, backend: &CudaBackend, steps: &[u8]) -> Result<()> {
        let mut wanted = steps.to_vec();
        let (at, first) = (STEP_AT..STEP_AT + 8, STEPS_BYTES.min(self.steps_bytes));
        let own = self.bytes[first..self.steps_bytes].chunks_exact(GROUP_BYTES);
        for (group, own) in groups_of(&mut wanted).zip(own) {
            group[at.clone()].copy_from_slice(&own[at.clone()]);
        }
        if wanted == self.bytes[..self.steps_bytes] {
            return Ok(());
        }
        // The counts are the device's: replays may have counted on.
        let head = wanted.len().min(STEPS_BYTES);
        let Some(memory) = &mut self.memory else { return Ok(()) };
        aside(backend, || memory.write(0, &wanted[..head]))?;
        self.bytes[..head].copy_from_slice(&wanted[..head]);
        if wanted == self.bytes[..self.steps_bytes] {
            return Ok(());
        }
        Err(unavailable(format!(
            "`{}`: expected the settings of parameters as in the last step, found others; run one \
             step before it is recorded",
            self.entry
        )))
    }

    /// Enqueues the launches of an update from the table at an address; returns their number.
    pub(crate) fn enqueue_update(
        &self,
        backend: &CudaBackend,
        stem: &'static str,
        step_scalars: &'static str,
        names: &[&'static str],
        table: u64,
    ) -> Result<u64, BackendError> {
        let groups = self.batch.groups.len() as u32;
        let blocks = groups.div_ceil(BLOCK_THREADS);
        let entry = Entry { stem, entry: step_scalars, threads: BLOCK_THREADS, blocks };
        entry.enqueue_packed(backend, bytemuck::bytes_of(&[table, self.address()]))?;
        for name in names {
            self.enqueue(backend, stem, name, table)?;
        }
        Ok(1 + names.len() as u64)
    }

    /// Enqueues one entry from the table at an address, that of steps or a recorded one's.
    pub(crate) fn enqueue(
        &self,
        backend: &CudaBackend,
        stem: &'static str,
        entry: &'static str,
        table: u64,
    ) -> Result<()> {
        let (threads, blocks) = self.grid;
        let mut recorded = self.recorded.iter();
        let recorded = recorded.find(|own| own.memory.address() == table);
        let arguments = recorded.map_or(&self.arguments, |own| &own.arguments);
        Entry { stem, entry, threads, blocks }.enqueue_packed(backend, arguments)
    }

    /// Changes the steps taken of all groups, as the device does.
    pub(crate) fn count(&mut self, next: impl Fn(u64) -> u64) {
        for group in groups_of(&mut self.bytes[..self.steps_bytes]) {
            let at = STEP_AT..STEP_AT + 8;
            let step = next(bytemuck::pod_read_unaligned(&group[at.clone()]));
            group[at].copy_from_slice(&step.to_le_bytes());
        }
    }

    /// Reads how many steps the device has counted since the last look; waits for it.
    pub(crate) fn steps_taken(&mut self) -> Result<u64, BackendError> {
        let Some(memory) = &self.memory else { return Ok(0) };
        let mut now = vec![0; self.steps_bytes];
        memory.read(0, &mut now)?;
        let before: Vec<u64> =
            groups_of(&mut self.bytes[..self.steps_bytes]).map(step_of).collect();
        let taken = groups_of(&mut now).map(step_of).zip(before);
        let taken = taken.map(|(now, before)| now.saturating_sub(before)).max();
        self.bytes[..self.steps_bytes].copy_from_slice(&now);
        Ok(taken.unwrap_or(0))
    }
}

fn step_of(group: &mut [u8]) -> u64 {
    bytemuck::pod_read_unaligned(&group[STEP_AT..STEP_AT + size_of::<u64>()])
}

/// The groups of steps.
fn groups_of(steps: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    let first = STEPS_BYTES.min(steps.len());
    steps[first..].chunks_exact_mut(GROUP_BYTES)
}

fn whole(entry: &str, batches: &[Batch], chunk_elements: u32) -> Result<Batch> {
    merged(entry, batches, chunk_elements).map_err(|error| unavailable(error.to_string()))
}
