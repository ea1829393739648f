//! Launches from tables in the device's memory.

use std::sync::PoisonError;

use fusestep_launch::{
    BackendError, Launch, LaunchReport, Reduce, ResidentTable, TensorSums, resident_step_scalars,
};

use super::{DeviceTable, Does, PlacedBatch, launch_addresses, reduce_addresses};
use crate::backend::CudaBackend;
use crate::entry::{BLOCK_THREADS, Entry};
use crate::tensor_sums::normed_of;
use crate::update_sums::SumsPart;
use crate::{NAME, Result, tensor_sums, update_sums};

pub(crate) fn enqueue(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    table: &dyn ResidentTable,
) -> Result<LaunchReport, BackendError> {
    let table = own(table)?;
    let of_parts = matches!(launch.tensor_sums, Some(TensorSums::Device(_)));
    let fits = match table.does {
        Does::UpdateParts { .. } => of_parts,
        Does::Run | Does::SumAndUpdate(_) => launch.tensor_sums.is_none(),
        Does::SumLeaves => false,
    };
    begin_table(backend, launch, table, fits)?;
    let mut launches = table.batches.len() as u64;
    let stem = launch.kernel.stem();
    let names = launch.kernel.normed().map(|normed| normed.sums_and_update());
    let names = match &names {
        Some(names) if of_parts => &[names.update][..],
        Some(names) => &[names.sums, names.update],
        None => &[table.entry],
    };
    launches += enqueue_all_sums(backend, table, SumsPart::Keep)?;
    if let Does::UpdateParts { places, .. } = &table.does {
        for arguments in places {
            tensor_sums::enqueue_places(backend, arguments)?;
            launches += 1;
        }
    }
    for name in names {
        for batch in &table.batches {
            enqueue_placed(backend, stem, name, batch)?;
            launches += 1;
        }
    }
    launches += enqueue_all_sums(backend, table, SumsPart::Sum)?;
    Ok(LaunchReport { launches, elements: table.elements })
}

/// Enqueues a table's sums over leaves, as [`fusestep_launch::Tables::leaf_sums_of_table`] says.
pub(crate) fn enqueue_leaves(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    table: &dyn ResidentTable,
) -> Result<()> {
    let table = own(table)?;
    begin_table(backend, launch, table, matches!(table.does, Does::SumLeaves))?;
    let sums = normed_of(launch)?.sums_and_update().sums;
    for batch in &table.batches {
        enqueue_placed(backend, launch.kernel.stem(), sums, batch)?;
    }
    Ok(())
}

/// Refuses a table of other lists or another purpose, and lets the device derive its step scalars.
fn begin_table(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    table: &DeviceTable,
    fits: bool,
) -> Result<()> {
    let addresses = launch_addresses(backend, launch)?;
    if table.addresses != addresses || table.entry != launch.kernel.entry() || !fits {
        return Err(BackendError::ForeignTable { backend: NAME });
    }
    let step_scalars = resident_step_scalars(NAME, launch.kernel)?;
    keep_table(backend, table);
    let stem = launch.kernel.stem();
    for batch in &table.batches {
        enqueue_step_scalars(backend, stem, step_scalars.entry, batch)?;
    }
    Ok(())
}

/// Derives the step scalars of a batch.
fn enqueue_step_scalars(
    backend: &CudaBackend,
    stem: &'static str,
    entry: &'static str,
    batch: &PlacedBatch,
) -> Result<()> {
    let entry =
        Entry { stem, entry, threads: BLOCK_THREADS, blocks: batch.groups.div_ceil(BLOCK_THREADS) };
    entry.enqueue(backend, &mut |bytes| {
        bytes[..8].copy_from_slice(&batch.table.to_le_bytes());
        bytes[8..16].copy_from_slice(&batch.memory.address().to_le_bytes());
    })
}

/// Enqueues a part of what sums over changes take, and returns the number of launches.
fn enqueue_all_sums(
    backend: &CudaBackend,
    table: &DeviceTable,
    part: SumsPart,
) -> Result<u64, BackendError> {
    let mut launches = 0;
    for sums in table.batches.iter().filter_map(|batch| batch.sums.as_ref()) {
        update_sums::enqueue(backend, sums, part)?;
        launches += 1;
    }
    Ok(launches)
}

fn enqueue_placed(
    backend: &CudaBackend,
    stem: &'static str,
    entry: &'static str,
    batch: &PlacedBatch,
) -> Result<()> {
    let entry = Entry { stem, entry, threads: batch.shape.threads, blocks: batch.shape.blocks };
    entry.enqueue_packed(backend, &batch.arguments)
}

/// Makes a graph that is being recorded keep a table and its rows.
fn keep_table(backend: &CudaBackend, table: &DeviceTable) {
    for batch in &table.batches {
        backend.keep(batch.memory.allocation());
        if let Some(sums) = &batch.sums {
            backend.keep(sums.memory.allocation());
        }
    }
    for allocation in &table.memory {
        backend.keep(allocation);
    }
    if let Some(rows) = table.does.rows() {
        let rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(allocation) = rows.allocation() {
            backend.keep(allocation);
        }
    }
}

pub(crate) fn enqueue_reads(
    backend: &CudaBackend,
    reduce: &Reduce<'_>,
    table: &dyn ResidentTable,
) -> Result<LaunchReport, BackendError> {
    let table = own(table)?;
    if table.addresses != reduce_addresses(backend, reduce)? || table.entry != reduce.kernel.entry()
    {
        return Err(BackendError::ForeignTable { backend: NAME });
    }
    keep_table(backend, table);
    for batch in &table.batches {
        enqueue_placed(backend, reduce.kernel.stem(), table.entry, batch)?;
    }
    Ok(LaunchReport { launches: table.batches.len() as u64, elements: 0 })
}

fn own(table: &dyn ResidentTable) -> Result<&DeviceTable, BackendError> {
    let table = table.as_any().downcast_ref::<DeviceTable>();
    table.ok_or(BackendError::ForeignTable { backend: NAME })
}
