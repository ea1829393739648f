//! How kernels that take sums over a tensor first are launched.
//!
//! Where a grid can wait for itself and no tensor goes on from one launch to the next, each batch
//! is one cooperative launch. Else all batches take their sums first and then all update, with the
//! same bits.

use std::sync::Arc;

use fusestep_kernels::ArgumentBlock;
use fusestep_launch::{
    Addresses, BackendError, Batch, Buffer, CHUNK_ELEMENTS, CHUNK_UNITS, HEADER_BYTES, Launch,
    NormedKernel, SLOT_VALUES, WORKSPACE_BYTES, Workspace, pack,
};

use crate::backend::{BLOCK_THREADS, CudaBackend, Entry, Grid};
use crate::buffer::{Allocation, DeviceBuffer};
use crate::session::{Session, unavailable};
use crate::{GridSync, NAME};

const SLOT_BYTES: usize = SLOT_VALUES as usize * size_of::<f64>();

/// Device memory for the sums of every chunk of a launch, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    buffer: Option<DeviceBuffer>,
    /// Tensors skipped that buffers which are gone had counted.
    skipped: u64,
}

impl Slots {
    /// The address of at least `count` slots. Only a launch of more chunks than any before
    /// allocates.
    pub(crate) fn at_least(
        &mut self,
        session: &Arc<Session>,
        count: u64,
    ) -> Result<u64, BackendError> {
        let len_bytes = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(SLOT_BYTES))
            .ok_or(BackendError::OutOfMemory {
                backend: NAME,
                len_bytes: usize::MAX,
            })?;
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

    /// Counts tensors that others have skipped.
    pub(crate) fn count_skipped(&mut self, skipped: u64) {
        self.skipped += skipped;
    }

    /// What keeps the memory, once there is some.
    pub(crate) fn allocation(&self) -> Option<&Arc<Allocation>> {
        self.buffer.as_ref().map(DeviceBuffer::allocation)
    }

    /// Tensors skipped since the last call; waits for the device.
    pub(crate) fn take_skipped(&mut self) -> Result<u64, BackendError> {
        let mut skipped = self.skipped;
        if let Some(buffer) = &mut self.buffer {
            let mut bytes = vec![0; buffer.len_bytes()];
            buffer.read(0, &mut bytes)?;
            for slot in bytes.chunks_exact(SLOT_BYTES) {
                let (_, counter) = slot.split_at(SLOT_BYTES - size_of::<f64>());
                skipped += bytemuck::pod_read_unaligned::<f64>(counter) as u64;
            }
            bytes.fill(0);
            buffer.write(0, &bytes)?;
        }
        self.skipped = 0;
        Ok(skipped)
    }
}

impl CudaBackend {
    /// Enqueues all batches of a launch whose kernel is normed; they have been checked.
    pub(crate) fn launch_normed(
        &self,
        launch: &Launch<'_>,
        normed: &dyn NormedKernel,
        addresses: Addresses<'_>,
    ) -> Result<(), BackendError> {
        let slots = self.slots(slot_count(launch)?)?;
        let wave_chunks = self.wave_chunks(launch);
        let enqueue = |index: usize, name: &'static str, grid: Grid| {
            let batch = &launch.batches[index];
            let entry = Entry {
                stem: launch.kernel.stem(),
                entry: name,
                block: ArgumentBlock::ByValue,
                threads: BLOCK_THREADS,
                grid,
            };
            let workspace = workspace(launch, index, slots, wave_chunks).bytes();
            self.enqueue(entry, &mut |bytes| {
                pack(launch, batch, addresses, bytes);
                bytes[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&workspace);
            })
        };
        let all = (0..launch.batches.len()).filter(|&index| launch.batches[index].chunks > 0);
        if self.waits_in_waves(launch) {
            for index in all {
                let at_most = units(&launch.batches[index]);
                enqueue(index, launch.kernel.entry(), Grid::Cooperative { at_most })?;
            }
            return Ok(());
        }
        for name in [
            normed.sums_and_update().sums,
            normed.sums_and_update().update,
        ] {
            for index in all.clone() {
                enqueue(
                    index,
                    name,
                    Grid::Independent(units(&launch.batches[index])),
                )?;
            }
        }
        Ok(())
    }

    /// Whether each batch takes its sums and updates in one launch.
    pub(crate) fn waits_in_waves(&self, launch: &Launch<'_>) -> bool {
        let uncut = launch.batches.iter().all(|batch| head_chunks(batch) == 0);
        self.grid_sync() == GridSync::Offered && uncut
    }

    /// Chunks of a wave: as many as half of the shared cache holds, for the update to find what the
    /// sums have read.
    pub(crate) fn wave_chunks(&self, launch: &Launch<'_>) -> u32 {
        if let Some(asked) = self.asked_wave_chunks() {
            return asked.get();
        }
        let lists = launch.kernel.lists().iter();
        let element_bytes: u64 = lists.map(|list| list.dtype.len_bytes() as u64).sum();
        let chunk_bytes = element_bytes * u64::from(CHUNK_ELEMENTS);
        let cached = self.device_info().l2_bytes / 2 / chunk_bytes.max(1);
        // A wave with less than two units for each multiprocessor would leave some without work.
        let busy = u64::from(self.device_info().multiprocessors) * 2 / CHUNK_UNITS;
        u32::try_from(cached.max(busy).max(1)).unwrap_or(u32::MAX)
    }
}

/// Refuses batches that are not cut at the chunks of the sums.
pub(crate) fn check_chunks(launch: &Launch<'_>) -> Result<(), BackendError> {
    if launch.limits.chunk_elements == CHUNK_ELEMENTS {
        return Ok(());
    }
    Err(unavailable(format!(
        "`{}` takes sums over chunks of {CHUNK_ELEMENTS} elements, the launch has chunks of {}; \
         make batches with `limits.of(kernel)`, or `limits.measured()` for sums over what is \
         changed",
        launch.kernel.entry(),
        launch.limits.chunk_elements
    )))
}

/// Slots that a launch takes, one for each chunk.
///
/// # Errors
/// [`BackendError::Unavailable`] for batches that are not cut at the chunks of the sums, or too
/// many chunks.
pub(crate) fn slot_count(launch: &Launch<'_>) -> Result<u64, BackendError> {
    check_chunks(launch)?;
    let chunks = launch.batches.iter().map(|batch| u64::from(batch.chunks));
    let chunks: u64 = chunks.sum();
    if u32::try_from(chunks).is_err() {
        return Err(unavailable(format!(
            "a step has {chunks} chunks, at most {} have room for their sums; shard the model",
            u32::MAX
        )));
    }
    Ok(chunks)
}

/// Turns of a block that a batch takes, as many as a grid can have.
pub(crate) fn units(batch: &Batch) -> u32 {
    batch
        .chunks
        .saturating_mul(CHUNK_UNITS as u32)
        .min(i32::MAX as u32)
}

/// Chunks of the first record's tensor in earlier batches.
fn head_chunks(batch: &Batch) -> u64 {
    let first = batch.records.first();
    first.map_or(0, |record| record.first_element / u64::from(CHUNK_ELEMENTS))
}

/// Chunks of the last record's tensor in later batches.
fn tail_chunks(batches: &[Batch], index: usize) -> u64 {
    let Some(last) = batches[index].records.last() else {
        return 0;
    };
    let mut chunks = 0;
    for later in &batches[index + 1..] {
        match later.records.first() {
            Some(record) if record.tensor == last.tensor => {
                chunks += record.numel.div_ceil(u64::from(CHUNK_ELEMENTS));
            }
            _ => break,
        }
    }
    chunks
}

pub(crate) fn workspace(
    launch: &Launch<'_>,
    index: usize,
    slots: u64,
    wave_chunks: u32,
) -> Workspace {
    let before = launch.batches[..index].iter();
    let first_slot: u64 = before.map(|batch| u64::from(batch.chunks)).sum();
    // All counts are part of the launch's, which fits a u32.
    let count = |chunks: u64| u32::try_from(chunks).unwrap_or(u32::MAX);
    Workspace {
        slots,
        wave_chunks,
        first_slot: count(first_slot),
        head_chunks: count(head_chunks(&launch.batches[index])),
        tail_chunks: count(tail_chunks(launch.batches, index)),
    }
}

#[cfg(test)]
mod tests {
    use fusestep_launch::{ArgumentLayout, Batchable, LaunchLimits, batches};

    use super::*;

    #[test]
    fn a_tensor_cut_over_launches_knows_all_its_chunks_in_each() {
        let limits = LaunchLimits {
            chunks_per_launch: 3,
            ..LaunchLimits::default()
        };
        let layout = ArgumentLayout {
            lists: 3,
            scalar_bytes: 56,
            set_bytes: 24,
        };
        let chunk = u64::from(CHUNK_ELEMENTS);
        let numels = [chunk, 7 * chunk + 1, 5];
        let tensors = (0..).zip(numels).map(|(tensor, numel)| Batchable {
            tensor,
            first_element: 0,
            numel,
            class: 0,
        });
        let batches = batches("test", tensors, layout, limits).unwrap();
        let heads: Vec<u64> = batches.iter().map(head_chunks).collect();
        let tails: Vec<u64> = (0..batches.len())
            .map(|i| tail_chunks(&batches, i))
            .collect();
        assert_eq!((heads, tails), (vec![0, 2, 5, 0], vec![6, 3, 0, 0]));
    }
}
