//! Tables in the device's memory: built once, launched with two addresses.

use std::any::Any;
use std::sync::{Arc, Mutex};

use fusestep_kernels::ArgumentBlock;
use fusestep_launch::{
    Addresses, BackendError, Batch, HEADER_BYTES, Launch, LaunchReport, Reduce, ResidentTable,
    SetValues, SquareSum, WORKSPACE_BYTES, pack_reduction_table, pack_steps, pack_table,
    push_waves, resident_sets,
};

use crate::NAME;
use crate::backend::{
    BLOCK_THREADS, CudaBackend, Entry, Grid, check_records, check_without_tensor_sums,
};
use crate::buffer::DeviceBuffer;
use crate::normed::{Slots, slot_count, units, workspace};
use crate::reduce::{check_end, read_list};
use crate::update_sums::check_update_sums;

/// Elements that a thread takes at a time, and threads of the smallest block worth its place.
const THREAD_ELEMENTS: u64 = 4;
const LEAST_THREADS: u64 = 32;
/// Of the largest block: the table's scalars are in registers, which leaves room for three blocks
/// of 256 threads on a multiprocessor and for one of 512.
const MOST_THREADS: u64 = 256;

/// The tables of one launch, one for each batch.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    /// The lists, the control block, the slots for update sums and the element that each list
    /// begins with, or the list and then the partial sums, that the tables were built from.
    addresses: Vec<u64>,
    /// Of the kernel that it was built for.
    entry: &'static str,
    batches: Vec<PlacedBatch>,
    way: Way,
    elements: u64,
    /// Where sums over tensors go: the table holds their address.
    slots: Option<Arc<Mutex<Slots>>>,
}

#[derive(Debug)]
struct PlacedBatch {
    /// What sets are derived from, and behind it the table.
    memory: DeviceBuffer,
    table: u64,
    chunks: u32,
    units: u32,
    classes: u32,
    threads: u32,
}

/// The launches behind the one that derives the sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A block per chunk.
    Chunks,
    /// Sums and updates in waves of one launch.
    Waves,
    /// All sums, then all updates.
    SumsAndUpdate,
}

impl ResidentTable for DeviceTable {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl CudaBackend {
    pub(crate) fn place_launch(
        &self,
        launch: &Launch<'_>,
        values: &[SetValues],
    ) -> Result<DeviceTable, BackendError> {
        let sets = resident_sets(NAME, launch.kernel)?;
        check_without_tensor_sums(launch)?;
        let addresses = self.launch_addresses(launch)?;
        for batch in launch.batches {
            check_records((launch.lists, launch.firsts), launch.offsets, batch)?;
        }
        check_update_sums(launch)?;
        let (lists, others) = addresses.split_at(launch.lists.len());
        let packed = Addresses {
            lists,
            control: others[0],
            update_sums: others[1],
        };
        let normed = launch.kernel.normed().is_some();
        let slots = if normed {
            Some(self.kernels().place_slots(slot_count(launch)?)?)
        } else {
            None
        };
        let mut batches = Vec::with_capacity(launch.batches.len());
        for (index, batch) in launch.batches.iter().enumerate() {
            let steps = pack_steps(&sets, launch.argument_layout(), batch, values);
            let mut table = pack_table(launch, batch, packed);
            if let Some((_, slots)) = &slots {
                let wave_chunks = self.wave_chunks(launch);
                let workspace = workspace(launch, index, *slots, wave_chunks).bytes();
                table[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&workspace);
                push_waves(&mut table, batch, launch.limits.chunk_elements, wave_chunks);
            }
            let threads = if normed {
                BLOCK_THREADS
            } else {
                threads_for(batch)
            };
            batches.push(self.place_batch(&steps, &table, batch, threads)?);
        }
        Ok(DeviceTable {
            addresses,
            entry: launch.kernel.entry(),
            batches,
            way: match (normed, self.waits_in_waves(launch)) {
                (false, _) => Way::Chunks,
                (true, true) => Way::Waves,
                (true, false) => Way::SumsAndUpdate,
            },
            elements: launch.batches.iter().map(Batch::elements).sum(),
            slots: slots.map(|(slots, _)| slots),
        })
    }

    fn place_batch(
        &self,
        steps: &[u8],
        table: &[u8],
        batch: &Batch,
        threads: u32,
    ) -> Result<PlacedBatch, BackendError> {
        let mut memory = DeviceBuffer::zeroed(&self.session, steps.len() + table.len())?;
        memory.write(0, &[steps, table].concat())?;
        Ok(PlacedBatch {
            table: memory.address() + steps.len() as u64,
            memory,
            chunks: batch.chunks,
            units: units(batch),
            // The batching loop counts them in 16 bits.
            classes: batch.classes.len() as u32,
            threads,
        })
    }

    /// The lists' addresses, those of the control block and of the slots for update sums, or 0, and
    /// the elements that the lists begin with.
    fn launch_addresses(&self, launch: &Launch<'_>) -> Result<Vec<u64>, BackendError> {
        let count = launch.lists.len();
        let mut addresses = Vec::with_capacity(2 * count + 2);
        for list in launch.lists.iter() {
            addresses.push(self.device_buffer(list.buffer.as_ref())?.address());
        }
        addresses.push(match launch.control {
            Some(control) => self.control_address(control)?,
            None => 0,
        });
        addresses.push(self.update_sums_address(launch)?);
        addresses.extend((0..count).map(|list| launch.first(list)));
        Ok(addresses)
    }

    pub(crate) fn enqueue_table(
        &self,
        launch: &Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        check_without_tensor_sums(launch)?;
        let table = own(table)?;
        let addresses = self.launch_addresses(launch)?;
        if table.addresses != addresses || table.entry != launch.kernel.entry() {
            return Err(BackendError::ForeignTable { backend: NAME });
        }
        let sets = resident_sets(NAME, launch.kernel)?;
        self.keep_table(table);
        let mut launches = 0;
        let stem = launch.kernel.stem();
        for batch in &table.batches {
            let blocks = batch.classes.div_ceil(BLOCK_THREADS);
            let entry = (stem, sets.entry, ArgumentBlock::Resident);
            self.enqueue_placed(entry, batch, BLOCK_THREADS, Grid::Independent(blocks))?;
            launches += 1;
        }
        let block = match launch.update_sums {
            Some(_) => ArgumentBlock::Measured,
            None => ArgumentBlock::Resident,
        };
        let mut enqueue = |name, batch: &PlacedBatch, threads, grid| {
            launches += 1;
            self.enqueue_placed((stem, name, block), batch, threads, grid)
        };
        match (table.way, launch.kernel.normed()) {
            (Way::SumsAndUpdate, Some(normed)) => {
                for name in [
                    normed.sums_and_update().sums,
                    normed.sums_and_update().update,
                ] {
                    for batch in &table.batches {
                        enqueue(name, batch, BLOCK_THREADS, Grid::Independent(batch.units))?;
                    }
                }
            }
            (Way::Waves, _) => {
                for batch in &table.batches {
                    let at_most = batch.units;
                    let grid = Grid::Cooperative { at_most };
                    enqueue(table.entry, batch, BLOCK_THREADS, grid)?;
                }
            }
            _ => {
                for batch in &table.batches {
                    enqueue(
                        table.entry,
                        batch,
                        batch.threads,
                        Grid::Independent(batch.chunks),
                    )?;
                }
            }
        }
        Ok(LaunchReport {
            launches,
            elements: table.elements,
        })
    }

    fn enqueue_placed(
        &self,
        (stem, entry, block): (&'static str, &'static str, ArgumentBlock),
        batch: &PlacedBatch,
        threads: u32,
        grid: Grid,
    ) -> Result<(), BackendError> {
        let entry = Entry {
            stem,
            entry,
            block,
            threads,
            grid,
        };
        self.enqueue(entry, &mut |bytes| {
            bytes[..8].copy_from_slice(&batch.table.to_le_bytes());
            bytes[8..16].copy_from_slice(&batch.memory.address().to_le_bytes());
        })
    }

    /// Makes a graph that is being recorded keep a table and its slots.
    fn keep_table(&self, table: &DeviceTable) {
        for batch in &table.batches {
            self.keep(batch.memory.allocation());
        }
        if let Some(slots) = &table.slots {
            let slots = slots
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(allocation) = slots.allocation() {
                self.keep(allocation);
            }
        }
    }

    pub(crate) fn set_lr_of(
        &self,
        table: &mut dyn ResidentTable,
        lr: f64,
    ) -> Result<(), BackendError> {
        let table = table.as_any_mut().downcast_mut::<DeviceTable>();
        let table = table.ok_or(BackendError::ForeignTable { backend: NAME })?;
        for batch in &mut table.batches {
            DeviceBuffer::of(&self.session, &batch.memory)?;
            batch.memory.set_f64(0, lr)?;
        }
        Ok(())
    }

    pub(crate) fn place_reads(&self, reduce: &Reduce<'_>) -> Result<DeviceTable, BackendError> {
        let addresses = self.reduce_addresses(reduce)?;
        let [list, partials] = addresses;
        let chunks: u64 = reduce.batches.iter().map(|b| u64::from(b.chunks)).sum();
        let width = size_of::<SquareSum>() as u64;
        let end = reduce.first_partial.saturating_add(chunks);
        check_end(end.saturating_mul(width), reduce.partials.len_bytes())?;
        let mut batches = Vec::with_capacity(reduce.batches.len());
        let mut next = partials;
        for batch in reduce.batches {
            let read = std::slice::from_ref(read_list(reduce)?);
            check_records((read, &[]), reduce.offsets, batch)?;
            let table = pack_reduction_table(reduce, batch, (list, next));
            batches.push(self.place_batch(&[], &table, batch, BLOCK_THREADS)?);
            next += u64::from(batch.chunks) * width;
        }
        Ok(DeviceTable {
            addresses: addresses.to_vec(),
            entry: reduce.kernel.entry(),
            batches,
            way: Way::Chunks,
            elements: 0,
            slots: None,
        })
    }

    /// Those of the list and of the reduction's first partial sum.
    fn reduce_addresses(&self, reduce: &Reduce<'_>) -> Result<[u64; 2], BackendError> {
        let list = self
            .device_buffer(read_list(reduce)?.buffer.as_ref())?
            .address();
        let partials = self.device_buffer(&*reduce.partials)?.address();
        let width = size_of::<SquareSum>() as u64;
        Ok([list, partials + reduce.first_partial * width])
    }

    pub(crate) fn enqueue_reads(
        &self,
        reduce: &Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        let table = own(table)?;
        if table.addresses != self.reduce_addresses(reduce)? || table.entry != reduce.kernel.entry()
        {
            return Err(BackendError::ForeignTable { backend: NAME });
        }
        self.keep_table(table);
        for batch in &table.batches {
            let name = (reduce.kernel.stem(), table.entry, ArgumentBlock::Resident);
            self.enqueue_placed(name, batch, batch.threads, Grid::Independent(batch.chunks))?;
        }
        Ok(LaunchReport {
            launches: table.batches.len() as u64,
            elements: 0,
        })
    }
}

fn own(table: &dyn ResidentTable) -> Result<&DeviceTable, BackendError> {
    let table = table.as_any().downcast_ref::<DeviceTable>();
    table.ok_or(BackendError::ForeignTable { backend: NAME })
}

/// Threads of a block: as many as its share of the elements keeps busy. Many small tensors in
/// blocks of 512 would leave most threads idle, and few such blocks fit on the device at once.
fn threads_for(batch: &Batch) -> u32 {
    let elements = batch.elements() / u64::from(batch.chunks.max(1));
    let threads = elements.div_ceil(THREAD_ELEMENTS).next_power_of_two();
    threads.clamp(LEAST_THREADS, MOST_THREADS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_large_as_their_chunks_need() {
        for (elements, threads) in [(1, 32), (64, 32), (512, 128), (1024, 256), (65_536, 256)] {
            let record = fusestep_launch::Record {
                tensor: 0,
                first_element: 0,
                numel: elements,
                first_chunk: 0,
                set: 0,
            };
            let batch = Batch {
                records: vec![record],
                classes: vec![0],
                chunks: 1,
            };
            assert_eq!(threads_for(&batch), threads, "{elements}");
        }
    }
}
