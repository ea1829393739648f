//! Updates of parts of tensors, by sums over the whole of each that come from all ranks.

use bytemuck::{Pod, Zeroable};
use fusestep_launch::{
    Addresses, BackendError, Batch, Buffer, CHUNK_ELEMENTS, CHUNK_UNITS, ChunkSums, LEAF_ELEMENTS,
    Launch, MAX_SUMS, NormedKernel, Record, TensorPartials, TensorSums, Workspace, pack,
};

use crate::backend::CudaBackend;
use crate::checks::{check_end, check_records};
use crate::entry::Entry;
use crate::normed::{check_chunks, row_count};
use crate::rows::ROW_BYTES;
use crate::session::unavailable;
use crate::{Result, normed};

/// Most records whose sums one launch places: MOST_PLACES of `kernels/tensor_sums.cu`.
const MOST_PLACES: usize = 2044;

/// Threads of a block that places sums, and its warps, each of which has a record.
const PLACE_THREADS: u32 = 128;
const PLACING_WARPS: u32 = PLACE_THREADS / 32;

/// Bytes before the records.
const PLACES_HEAD_BYTES: usize = 4 * size_of::<u64>();

/// One record of an update, as `kernels/tensor_sums.cu` reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RecordPlace {
    tensor: u32,
    first_row: u32,
    rows: u32,
    reserved: u32,
}

/// The place of a launch's rows.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rows: u64,
    pub(crate) first_row: u32,
}

/// Enqueues sums over leaves into rows, as [`fusestep_launch::DeviceSums::leaf_sums_into`] says.
pub(crate) fn enqueue_leaf_sums(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    rows: &mut dyn Buffer,
    first: u64,
) -> Result<()> {
    let (normed, place) = check_leaf_sums(backend, launch, rows, first)?;
    enqueue_parts(backend, launch, normed.sums_and_update().sums, launch.batches, place)
}

/// Refuses records of more leaves than a row has, and rows behind the buffer. Returns the kernel
/// and the place of its rows.
pub(crate) fn check_leaf_sums<'a>(
    backend: &CudaBackend,
    launch: &Launch<'a>,
    rows: &dyn Buffer,
    first: u64,
) -> Result<(&'a dyn NormedKernel, Place), BackendError> {
    let normed = normed_of(launch)?;
    let mut count = 0;
    for batch in launch.batches {
        check_records(launch.lists, launch.firsts, launch.offsets, batch)?;
        let most = CHUNK_UNITS * LEAF_ELEMENTS;
        if let Some(long) = batch.records.iter().find(|record| record.numel > most) {
            return Err(unavailable(format!(
                "expected records of {most} elements at most, one leaf to a unit, found one \
                 of {}",
                long.numel
            )));
        }
        count += u64::from(batch.chunks);
    }
    let end = first.saturating_add(count);
    check_end(end.saturating_mul(ROW_BYTES as u64), rows.len_bytes())?;
    let place = Place {
        rows: backend.address(rows)?,
        first_row: u32::try_from(first)
            .map_err(|_| unavailable(format!("row {first} is beyond what 32 bits count")))?,
    };
    Ok((normed, place))
}

/// Updates parts of tensors by the sums over the whole of each: each record is a tensor of its
/// own, whose first chunk has all of its sums.
pub(crate) fn launch_with_sums(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    normed: &dyn NormedKernel,
    sums: TensorSums<'_>,
) -> Result<()> {
    check_chunks(launch)?;
    let chunks = row_count(launch)?;
    let rows = match sums {
        TensorSums::Host(sums) => write_tensor_sums(backend, launch, chunks, sums)?,
        TensorSums::Device(sums) => place_tensor_sums(backend, launch, chunks, sums)?,
    };
    let place = Place { rows, first_row: 0 };
    enqueue_parts(backend, launch, normed.sums_and_update().update, launch.batches, place)
}

/// Writes sums that the host has, and returns the address of the rows; waits for the device.
pub(crate) fn write_tensor_sums(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    chunks: u64,
    sums: &[[f64; MAX_SUMS]],
) -> Result<u64, BackendError> {
    let mut values = vec![0.0; chunks as usize * ROW_BYTES / size_of::<f64>()];
    for (record, place) in places(launch) {
        let first = place.first_row as usize * ROW_BYTES / size_of::<f64>();
        if let Some(sums) = sums.get(record.tensor as usize) {
            values[first..first + MAX_SUMS].copy_from_slice(sums);
        }
    }
    backend.session.enter()?;
    let mut kernels = backend.kernels();
    let skipped = kernels.part_rows.take_skipped()?;
    kernels.part_rows.count_skipped(skipped);
    let address = kernels.part_rows.at_least(&backend.session, chunks)?;
    kernels.part_rows.write(bytemuck::cast_slice(&values))?;
    Ok(address)
}

/// Lets the device add up the sums of chunks, and put those of each tensor where the update looks
/// for them. Returns the address of the rows.
fn place_tensor_sums(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    chunks: u64,
    sums: ChunkSums<'_>,
) -> Result<u64, BackendError> {
    backend.session.enter()?;
    let rows = backend.kernels().part_rows.at_least(&backend.session, chunks)?;
    for arguments in pack_places(backend, launch, rows, sums)? {
        enqueue_places(backend, &arguments)?;
    }
    Ok(rows)
}

/// The arguments of the launches that put the sums of each tensor into rows.
pub(crate) fn pack_places(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    rows: u64,
    sums: ChunkSums<'_>,
) -> Result<Vec<Vec<u8>>, BackendError> {
    let places: Vec<RecordPlace> = places(launch).map(|(_, place)| place).collect();
    let tensors = places.iter().map(|place| u64::from(place.tensor) + 1).max();
    let width = size_of::<TensorPartials>() as u64;
    check_end(tensors.unwrap_or(0) * width, sums.tensors.len_bytes())?;
    let [sums, tensors] = [backend.address(sums.sums)?, backend.address(sums.tensors)?];
    let packed = places.chunks(MOST_PLACES).map(|places| {
        let head = [rows, sums, tensors, places.len() as u64];
        [bytemuck::bytes_of(&head), bytemuck::cast_slice(places)].concat()
    });
    Ok(packed.collect())
}

/// Enqueues one launch of [`pack_places`].
pub(crate) fn enqueue_places(backend: &CudaBackend, arguments: &[u8]) -> Result<()> {
    let records = (arguments.len() - PLACES_HEAD_BYTES) / size_of::<RecordPlace>();
    let entry = Entry {
        stem: "tensor_sums",
        entry: "tensor_sums_place",
        threads: PLACE_THREADS,
        // A launch has few enough.
        blocks: (records as u32).div_ceil(PLACING_WARPS),
    };
    entry.enqueue_packed(backend, arguments)
}

/// Enqueues one entry of a normed kernel on batches whose records are tensors of their own.
pub(crate) fn enqueue_parts(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    name: &'static str,
    batches: &[Batch],
    place: Place,
) -> Result<()> {
    let addresses = backend.list_addresses(launch)?;
    let addresses = Addresses {
        lists: &addresses[..launch.lists.len()],
        control: backend.control_address(launch.control)?,
    };
    enqueue_parts_with(backend, launch, name, batches, place, &|batch, bytes| {
        pack(launch, batch, addresses, bytes);
    })
}

/// Enqueues what [`enqueue_parts`] does, with arguments that `pack` writes.
pub(crate) fn enqueue_parts_with(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    name: &'static str,
    batches: &[Batch],
    place: Place,
    pack: &dyn Fn(&Batch, &mut [u8]),
) -> Result<()> {
    for (batch, workspace) in batches.iter().zip(workspaces_of_parts(batches, place)) {
        normed::enqueue(backend, launch, name, batch, workspace, pack)?;
    }
    Ok(())
}

/// The workspaces of batches whose records are tensors of their own.
pub(crate) fn workspaces_of_parts(
    batches: &[Batch],
    place: Place,
) -> impl Iterator<Item = Workspace> {
    let mut next = place.first_row;
    batches.iter().map(move |batch| {
        let first_row = next;
        next = next.saturating_add(batch.chunks);
        Workspace { rows: place.rows, first_row, head_chunks: 0, tail_chunks: 0 }
    })
}

/// The records of a launch, each with its parameter and its rows, which follow each other.
fn places<'a>(launch: &'a Launch<'_>) -> impl Iterator<Item = (&'a Record, RecordPlace)> {
    let mut next = 0;
    let records = launch.batches.iter().flat_map(|batch| &batch.records);
    records.map(move |record| {
        // A launch has no more chunks than 32 bits count: `row_count`.
        let rows = record.numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as u32;
        let place = RecordPlace {
            tensor: launch.members[record.tensor as usize],
            first_row: next,
            rows,
            reserved: 0,
        };
        next += rows;
        (record, place)
    })
}

/// The launch's kernel, as one that takes sums over tensors.
///
/// # Errors
/// [`BackendError::Unavailable`] for a kernel that takes no sums.
pub(crate) fn normed_of<'a>(launch: &Launch<'a>) -> Result<&'a dyn NormedKernel, BackendError> {
    launch.kernel.normed().ok_or_else(|| {
        let entry = launch.kernel.entry();
        unavailable(format!("expected a kernel that takes sums over tensors, found `{entry}`"))
    })
}
