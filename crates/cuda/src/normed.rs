//! Launches of kernels that take sums over tensors: all batches take their sums, and then all
//! update.

use fusestep_launch::{
    BackendError, Batch, CHUNK_ELEMENTS, CHUNK_UNITS, HEADER_BYTES, LEAF_ELEMENTS, Launch,
    NormedKernel, WORKSPACE_BYTES, Workspace,
};

use crate::Result;
use crate::backend::CudaBackend;
use crate::entry::{BLOCK_THREADS, Entry, GRID_MAX};
use crate::session::unavailable;

/// Threads for one leaf, a lane each, as `kernels/normed.cuh` knows them.
const LEAF_THREADS: u32 = 64;

/// Enqueues all batches of a launch whose kernel is normed; they have been checked, and `pack`
/// writes the arguments of one.
pub(crate) fn launch(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    normed: &dyn NormedKernel,
    pack: &dyn Fn(&Batch, &mut [u8]),
) -> Result<()> {
    let rows = backend.rows(row_count(launch)?)?;
    let names = normed.sums_and_update();
    for name in [names.sums, names.update] {
        let batches = launch.batches.iter().enumerate();
        for (index, batch) in batches {
            let workspace = workspace(launch, index, rows);
            enqueue(backend, launch, name, batch, workspace, pack)?;
        }
    }
    Ok(())
}

/// Enqueues one entry of a normed kernel on a batch, unless that is empty.
pub(crate) fn enqueue(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    name: &'static str,
    batch: &Batch,
    workspace: Workspace,
    pack: &dyn Fn(&Batch, &mut [u8]),
) -> Result<()> {
    if batch.chunks == 0 {
        return Ok(());
    }
    let (threads, blocks) = shape(batch);
    let entry = Entry { stem: launch.kernel.stem(), entry: name, threads, blocks };
    let workspace = workspace.bytes();
    entry.enqueue(backend, &mut |bytes| {
        pack(batch, bytes);
        bytes[HEADER_BYTES..HEADER_BYTES + WORKSPACE_BYTES].copy_from_slice(&workspace);
    })
}

/// Refuses batches that are not cut at the chunks of the sums.
pub(crate) fn check_chunks(launch: &Launch<'_>) -> Result<()> {
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

/// Rows that a launch takes, one for each chunk.
///
/// # Errors
/// [`BackendError::Unavailable`] for batches that are not cut at the chunks of the sums, or too
/// many chunks.
pub(crate) fn row_count(launch: &Launch<'_>) -> Result<u64, BackendError> {
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

/// Threads of a block, and blocks, for a batch: one block for each unit of its chunks. Where most
/// units have no elements, as with tensors of few leaves, one for each unit that has some. Blocks
/// go on by the size of the grid, and an odd one takes each of them through all units.
///
/// If no tensor is longer than a leaf, a block has the threads of one leaf and takes a chunk.
pub(crate) fn shape(batch: &Batch) -> (u32, u32) {
    let mut records = batch.records.iter();
    if records.all(|record| record.numel <= LEAF_ELEMENTS) && batch.chunks > 0 {
        return (LEAF_THREADS, batch.chunks);
    }
    let all = u64::from(batch.chunks) * CHUNK_UNITS;
    let filled: u64 = batch.records.iter().map(|record| filled(record.numel)).sum();
    let blocks = if 2 * filled > all { all } else { filled | 1 };
    let blocks = u32::try_from(blocks).map_or(GRID_MAX, |blocks| blocks.min(GRID_MAX));
    (BLOCK_THREADS, blocks)
}

/// Units with elements: unit u has leaves u, u + 8, … of a chunk.
fn filled(numel: u64) -> u64 {
    let chunk = u64::from(CHUNK_ELEMENTS);
    let last = (numel % chunk).div_ceil(LEAF_ELEMENTS);
    numel / chunk * CHUNK_UNITS + last.min(CHUNK_UNITS)
}

/// Chunks of the first record's tensor in earlier batches.
pub(crate) fn head_chunks(batch: &Batch) -> u64 {
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

pub(crate) fn workspace(launch: &Launch<'_>, index: usize, rows: u64) -> Workspace {
    let before = launch.batches[..index].iter();
    let first_row: u64 = before.map(|batch| u64::from(batch.chunks)).sum();
    // All counts are part of the launch's, which fits a u32.
    let count = |chunks: u64| u32::try_from(chunks).unwrap_or(u32::MAX);
    Workspace {
        rows,
        first_row: count(first_row),
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
        let limits = LaunchLimits { chunks_per_launch: 3, ..LaunchLimits::default() };
        let layout = ArgumentLayout { lists: 3, scalar_bytes: 56, step_scalar_bytes: 24 };
        let chunk = u64::from(CHUNK_ELEMENTS);
        let numels = [chunk, 7 * chunk + 1, 5];
        let tensors = (0..).zip(numels).map(|(tensor, numel)| Batchable {
            tensor,
            first_element: 0,
            numel,
            group: 0,
        });
        let batches = batches("test", tensors, layout, limits).unwrap();
        let heads: Vec<u64> = batches.iter().map(head_chunks).collect();
        let tails: Vec<u64> = (0..batches.len()).map(|i| tail_chunks(&batches, i)).collect();
        assert_eq!((heads, tails), (vec![0, 2, 5, 0], vec![6, 3, 0, 0]));
    }

    #[test]
    fn small_tensors_take_a_small_block_each_and_large_ones_one_for_each_unit() {
        let chunk = u64::from(CHUNK_ELEMENTS);
        for (numels, expected) in [
            (vec![1; 10_000], (64, 10_000)),
            (vec![1024, 5, 1], (64, 3)),
            (vec![1025, 1], (512, 3)),
            (vec![1025; 10_000], (512, 20_001)),
            (vec![chunk], (512, 8)),
            (vec![7 * 1024 + 1], (512, 8)),
            (vec![chunk * 5 + 1, 9000], (512, 56)),
        ] {
            let tensors = (0..).zip(numels.iter()).map(|(tensor, &numel)| Batchable {
                tensor,
                first_element: 0,
                numel,
                group: 0,
            });
            let layout = ArgumentLayout { lists: 3, scalar_bytes: 56, step_scalar_bytes: 24 };
            let limits = LaunchLimits::with_argument_bytes(usize::MAX);
            let batches = batches("test", tensors, layout, limits).unwrap();
            assert_eq!(shape(&batches[0]), expected, "{numels:?}");
        }
    }
}
