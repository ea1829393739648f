//! Tables in the device's memory: built once, launched with two addresses.

use std::any::Any;
use std::sync::{Arc, Mutex};

use fusestep_launch::{
    Addresses, ArgumentLayout, BackendError, Batch, HEADER_BYTES, Launch, LaunchReport, Reduce,
    ResidentTable, SetValues, SquareSum, WORKSPACE_BYTES, pack_launch_of_table,
    pack_reduction_table, pack_steps, pack_table, resident_sets,
};

use crate::NAME;
use crate::backend::{BLOCK_THREADS, CudaBackend, Entry, threads_for};
use crate::buffer::DeviceBuffer;
use crate::checks::check_records;
use crate::leaves::check_without_tensor_sums;
use crate::normed::{self, Slots, slot_count, workspace};
use crate::reduce::{check_end, read_list};
use crate::update_sums::{PlacedSums, SumsPart, check_update_sums};

/// The tables of one launch, one for each batch.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    /// The lists, the control block, the slots for update sums and the element that each list
    /// begins with, or the list and then the partial sums, that the tables were built from.
    addresses: Vec<u64>,
    /// Of the kernel that it was built for.
    entry: &'static str,
    batches: Vec<PlacedBatch>,
    elements: u64,
    /// Where sums over tensors go: the table holds their address.
    slots: Option<Arc<Mutex<Slots>>>,
}

#[derive(Debug)]
struct PlacedBatch {
    /// What sets are derived from, and behind it the table.
    memory: DeviceBuffer,
    table: u64,
    /// Of launches from the table.
    arguments: Vec<u8>,
    classes: u32,
    shape: Shape,
    sums: Option<PlacedSums>,
}

/// How a batch is launched.
#[derive(Clone, Copy, Debug)]
struct Shape {
    threads: u32,
    blocks: u32,
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
        };
        let normed = launch.kernel.normed().is_some();
        let slots = if normed {
            Some(self.kernels().place_slots(slot_count(launch)?)?)
        } else {
            None
        };
        let mut batches = Vec::with_capacity(launch.batches.len());
        for (index, batch) in launch.batches.iter().enumerate() {
            let layout = launch.kernel.argument_layout();
            let steps = pack_steps(&sets, layout, batch, values);
            let mut table = pack_table(launch, batch, packed);
            let mut shape = Shape {
                threads: threads_for(batch),
                blocks: batch.chunks,
            };
            if let Some((_, slots)) = &slots {
                let workspace = workspace(launch, index, *slots).bytes();
                table[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&workspace);
                let (threads, blocks) = normed::shape(batch);
                shape = Shape { threads, blocks };
            }
            let mut placed = self.place_batch(&steps, (&table, layout), batch, shape)?;
            let tensor_slots = slots.as_ref().map(|(_, address)| *address);
            let control_and_sums = (others[0], others[1]);
            placed.sums = self.place_sums(launch, index, lists, control_and_sums, tensor_slots)?;
            batches.push(placed);
        }
        Ok(DeviceTable {
            addresses,
            entry: launch.kernel.entry(),
            batches,
            elements: launch.batches.iter().map(Batch::elements).sum(),
            slots: slots.map(|(slots, _)| slots),
        })
    }

    fn place_batch(
        &self,
        steps: &[u8],
        (table, layout): (&[u8], ArgumentLayout),
        batch: &Batch,
        shape: Shape,
    ) -> Result<PlacedBatch, BackendError> {
        let mut memory = DeviceBuffer::zeroed(&self.session, steps.len() + table.len())?;
        memory.write(0, &[steps, table].concat())?;
        let address = memory.address() + steps.len() as u64;
        Ok(PlacedBatch {
            table: address,
            memory,
            arguments: pack_launch_of_table(table, layout, address),
            // The batching loop counts them in 16 bits.
            classes: batch.classes.len() as u32,
            shape,
            sums: None,
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
            self.enqueue_sets((stem, sets.entry), batch)?;
            launches += 1;
        }
        let names = launch
            .kernel
            .normed()
            .map(|normed| normed.sums_and_update());
        let names = match &names {
            Some(names) => &[names.sums, names.update][..],
            None => &[table.entry],
        };
        launches += self.enqueue_all_sums(table, SumsPart::Keep)?;
        for name in names {
            for batch in &table.batches {
                self.enqueue_placed((stem, name), batch)?;
                launches += 1;
            }
        }
        launches += self.enqueue_all_sums(table, SumsPart::Sum)?;
        Ok(LaunchReport {
            launches,
            elements: table.elements,
        })
    }

    /// Derives the sets of a batch.
    fn enqueue_sets(
        &self,
        (stem, entry): (&'static str, &'static str),
        batch: &PlacedBatch,
    ) -> Result<(), BackendError> {
        let entry = Entry {
            stem,
            entry,
            threads: BLOCK_THREADS,
            blocks: batch.classes.div_ceil(BLOCK_THREADS),
        };
        self.enqueue(entry, &mut |bytes| {
            bytes[..8].copy_from_slice(&batch.table.to_le_bytes());
            bytes[8..16].copy_from_slice(&batch.memory.address().to_le_bytes());
        })
    }

    /// Enqueues a part of what sums over changes take, and returns the number of launches.
    fn enqueue_all_sums(&self, table: &DeviceTable, part: SumsPart) -> Result<u64, BackendError> {
        let mut launches = 0;
        for sums in table.batches.iter().filter_map(|batch| batch.sums.as_ref()) {
            self.enqueue_sums(sums, part)?;
            launches += 1;
        }
        Ok(launches)
    }

    fn enqueue_placed(
        &self,
        (stem, entry): (&'static str, &'static str),
        batch: &PlacedBatch,
    ) -> Result<(), BackendError> {
        let entry = Entry {
            stem,
            entry,
            threads: batch.shape.threads,
            blocks: batch.shape.blocks,
        };
        self.enqueue_packed(entry, &batch.arguments)
    }

    /// Makes a graph that is being recorded keep a table and its slots.
    fn keep_table(&self, table: &DeviceTable) {
        for batch in &table.batches {
            self.keep(batch.memory.allocation());
            if let Some(sums) = &batch.sums {
                self.keep(sums.memory.allocation());
            }
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
            let layout = reduce.kernel.argument_layout();
            let shape = Shape {
                threads: threads_for(batch),
                blocks: batch.chunks,
            };
            batches.push(self.place_batch(&[], (&table, layout), batch, shape)?);
            next += u64::from(batch.chunks) * width;
        }
        Ok(DeviceTable {
            addresses: addresses.to_vec(),
            entry: reduce.kernel.entry(),
            batches,
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
            self.enqueue_placed((reduce.kernel.stem(), table.entry), batch)?;
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
