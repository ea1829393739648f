//! Sums over leaves, for tensors that ranks have parts of. The entries that sum up chunks get so
//! few elements at a time that each sum they leave is that of one leaf.

use fusestep_launch::{
    BackendError, Batch, Batchable, Buffer, CHUNK_ELEMENTS, CHUNK_UNITS, FoldLeaves, LEAF_ELEMENTS,
    Launch, LaunchLimits, LeafSquares, MAX_SUMS, Memory, MultiTensorReduction, Record, SquareSum,
    TensorList, TensorPartials, batches, pack_reduction_of_tensors,
};
use fusestep_simd::Level;

use crate::backend::CudaBackend;
use crate::checks::{check_end, check_records};
use crate::entry::Entry;
use crate::rows::ROW_BYTES;
use crate::session::unavailable;
use crate::tensor_sums::{Place, normed_of};
use crate::{NAME, Result, tensor_sums};

/// Threads of a block that sums up one leaf: one warp, whose groups take lines of it.
const LEAF_THREADS: u32 = 32;

/// Leaves of a part, each in a unit of its own, so that the sum of the unit is that of the leaf.
const LEAVES_AT_ONCE: u64 = CHUNK_UNITS;

/// Threads of a block that folds chunks, a warp each.
const FOLD_THREADS: u32 = 128;

/// A reduction whose chunks are leaves: the other leaves of its tree are empty and add 0.
struct OfLeaves<'a>(&'a dyn MultiTensorReduction);

impl MultiTensorReduction for OfLeaves<'_> {
    fn stem(&self) -> &'static str {
        self.0.stem()
    }

    fn entry(&self) -> &'static str {
        self.0.entry()
    }

    fn list(&self) -> TensorList {
        self.0.list()
    }

    fn chunk_elements(&self) -> u32 {
        LEAF_ELEMENTS as u32
    }

    fn run_host(&self, level: Level, chunk: &[u8]) -> SquareSum {
        self.0.run_host(level, chunk)
    }
}

/// Reads the sums of squares of leaves, as [`fusestep_launch::Launches::leaf_squares`] says; only
/// the sums go to the host.
pub(crate) fn squares(
    backend: &CudaBackend,
    leaves: LeafSquares<'_>,
    sums: &mut [SquareSum],
) -> Result<()> {
    let records = leaves.batches.iter().flat_map(|batch| &batch.records);
    let count = records.map(|record| leaves_of(record.numel)).sum::<u64>();
    check_count(count, sums)?;
    let len_bytes = size_of_val(sums);
    let partials = leaf_rows(backend, len_bytes.div_ceil(ROW_BYTES) as u64)?;
    enqueue_leaf_squares(backend, leaves, partials)?;
    read_leaf_rows(backend, bytemuck::cast_slice_mut(sums))
}

/// Enqueues sums of squares of leaves, as [`fusestep_launch::DeviceSums::leaf_squares_into`] says.
pub(crate) fn squares_into(
    backend: &CudaBackend,
    leaves: LeafSquares<'_>,
    into: &mut dyn Buffer,
    first: u64,
) -> Result<()> {
    let records = leaves.batches.iter().flat_map(|batch| &batch.records);
    let count = records.map(|record| leaves_of(record.numel)).sum::<u64>();
    let width = size_of::<SquareSum>() as u64;
    let end = first.saturating_add(count).saturating_mul(width);
    check_end(end, into.len_bytes())?;
    let address = backend.address(into)?;
    enqueue_leaf_squares(backend, leaves, address + first * width)
}

/// Enqueues a fold of leaves into chunks, as [`fusestep_launch::DeviceSums::fold_leaves`] says.
pub(crate) fn enqueue_fold(backend: &CudaBackend, fold: FoldLeaves<'_>) -> Result<()> {
    let chunks = (fold.places.len_bytes() / size_of::<TensorPartials>()) as u64;
    const { assert!(size_of::<SquareSum>() == size_of::<[f64; MAX_SUMS]>()) };
    let width = size_of::<SquareSum>() as u64;
    check_end(chunks.saturating_mul(width), fold.partials.len_bytes())?;
    if chunks == 0 {
        return Ok(());
    }
    let leaves = backend.address(fold.leaves)?;
    let [places, partials] = [backend.address(fold.places)?, backend.address(&*fold.partials)?];
    let blocks = chunks.div_ceil(u64::from(FOLD_THREADS / LEAF_THREADS));
    let blocks = u32::try_from(blocks)
        .map_err(|_| unavailable(format!("{chunks} chunks are more than one launch folds")))?;
    let entry = |stem, entry| Entry { stem, entry, threads: FOLD_THREADS, blocks };
    match fold.index {
        None => {
            let arguments = [leaves, places, partials, chunks];
            entry("amp", "amp_fold").enqueue_packed(backend, bytemuck::bytes_of(&arguments))
        }
        Some(index) => {
            let arguments = [leaves, backend.address(index)?, places, partials, chunks];
            let entry = entry("tensor_sums", "tensor_sums_fold");
            entry.enqueue_packed(backend, bytemuck::bytes_of(&arguments))
        }
    }
}

/// Enqueues the sums of all leaves of a read, from an address on.
fn enqueue_leaf_squares(
    backend: &CudaBackend,
    leaves: LeafSquares<'_>,
    partials: u64,
) -> Result<()> {
    let records = || leaves.batches.iter().flat_map(|batch| &batch.records);
    let list = backend.address(leaves.list.buffer.as_ref())?;
    for batch in leaves.batches {
        let lists = std::slice::from_ref(leaves.list);
        check_records(lists, &[leaves.first], leaves.offsets, batch)?;
    }
    let kernel = OfLeaves(leaves.kernel);
    let limits = LaunchLimits { chunk_elements: kernel.chunk_elements(), ..backend.limits() };
    let tensors = records().map(|record| Batchable {
        tensor: record.tensor,
        first_element: record.first_element,
        numel: record.numel,
        group: 0,
    });
    let batches = batches(kernel.entry(), tensors, kernel.argument_layout(), limits)
        .map_err(|error| unavailable(error.to_string()))?;
    let width = leaves.list.dtype().len_bytes() as u64;
    let place =
        |&offset: &u64| list.wrapping_add(offset.wrapping_sub(leaves.first).wrapping_mul(width));
    let addresses: Vec<u64> = leaves.offsets.iter().map(place).collect();
    let mut next = partials;
    for batch in &batches {
        let entry = Entry {
            stem: kernel.stem(),
            entry: kernel.entry(),
            threads: LEAF_THREADS,
            blocks: batch.chunks,
        };
        entry.enqueue(backend, &mut |bytes| {
            pack_reduction_of_tensors(&kernel, batch, &addresses, next, bytes);
        })?;
        next += u64::from(batch.chunks) * size_of::<SquareSum>() as u64;
    }
    Ok(())
}

/// Reads a kernel's sums over leaves, as [`fusestep_launch::Launches::leaf_sums`] says.
pub(crate) fn sums(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    sums: &mut [[f64; MAX_SUMS]],
) -> Result<()> {
    let normed = normed_of(launch)?;
    let parts = parts_of(launch.batches);
    let count = parts.iter().map(|part| leaves_of(part.numel)).sum::<u64>();
    check_count(count, sums)?;
    let limits = LaunchLimits {
        chunk_elements: CHUNK_ELEMENTS,
        argument_bytes: backend.session.info.argument_bytes,
        ..launch.limits
    };
    let layout = launch.kernel.argument_layout();
    let batches = batches(launch.kernel.entry(), parts.iter().copied(), layout, limits)
        .map_err(|error| unavailable(error.to_string()))?;
    for batch in &batches {
        check_records(launch.lists, launch.firsts, launch.offsets, batch)?;
    }
    let rows = leaf_rows(backend, parts.len() as u64)?;
    let place = Place { rows, first_row: 0 };
    tensor_sums::enqueue_parts(backend, launch, normed.sums_and_update().sums, &batches, place)?;
    let mut values = vec![0.0; parts.len() * ROW_BYTES / size_of::<f64>()];
    read_leaf_rows(backend, bytemuck::cast_slice_mut(&mut values))?;
    let rows = values.chunks_exact(ROW_BYTES / size_of::<f64>());
    let of_parts = rows.zip(&parts).flat_map(|(row, part)| {
        let units = row.chunks_exact(MAX_SUMS);
        units.take(leaves_of(part.numel) as usize)
    });
    for (sums, unit) in sums.iter_mut().zip(of_parts) {
        sums.copy_from_slice(unit);
    }
    Ok(())
}

/// The address of `count` rows for sums over leaves, which are set to 0.
fn leaf_rows(backend: &CudaBackend, count: u64) -> Result<u64, BackendError> {
    backend.session.enter()?;
    let mut kernels = backend.kernels();
    kernels.leaf_rows.at_least(&backend.session, count)?;
    kernels.leaf_rows.zero()
}

/// Reads the rows for sums over leaves; waits for the launch that fills them.
fn read_leaf_rows(backend: &CudaBackend, bytes: &mut [u8]) -> Result<()> {
    backend.kernels().leaf_rows.read(bytes)
}

/// The records of a launch in parts of [`LEAVES_AT_ONCE`].
fn parts_of(batches: &[Batch]) -> Vec<Batchable> {
    let part = LEAVES_AT_ONCE * LEAF_ELEMENTS;
    let of_record = |batch: &Batch, record: &Record| {
        let (tensor, first, numel) = (record.tensor, record.first_element, record.numel);
        let group = batch.groups.get(usize::from(record.group)).copied();
        (0..numel).step_by(part as usize).map(move |at| Batchable {
            tensor,
            first_element: first + at,
            numel: part.min(numel - at),
            group: group.unwrap_or(0),
        })
    };
    let of_batch = |batch: &Batch| -> Vec<Batchable> {
        let records = batch.records.iter();
        records.flat_map(|record| of_record(batch, record)).collect()
    };
    batches.iter().flat_map(of_batch).collect()
}

fn leaves_of(numel: u64) -> u64 {
    numel.div_ceil(LEAF_ELEMENTS)
}

fn check_count<T>(expected: u64, sums: &[T]) -> Result<()> {
    if expected == sums.len() as u64 {
        return Ok(());
    }
    Err(BackendError::OutOfBounds {
        backend: NAME,
        offset_bytes: 0,
        len_bytes: expected as usize * size_of::<T>(),
        found: size_of_val(sums),
    })
}

/// Refuses sums that others have taken: the kernels here take those of whole tensors themselves.
pub(crate) fn check_without_tensor_sums(launch: &Launch<'_>) -> Result<()> {
    match launch.tensor_sums {
        None => Ok(()),
        Some(_) => Err(unavailable(format!(
            "`{}`: expected whole tensors, found parts and the sums over the whole of them; give \
             whole tensors to ranks (`Ownership::Tensors`)",
            launch.kernel.entry()
        ))),
    }
}
