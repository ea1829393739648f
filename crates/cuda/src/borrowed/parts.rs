//! Borrowed parts of tensors: sums over each part, and updates by sums over the whole of each.
//!
//! ```text
//! part ─► rows, one for each chunk ─► host: one sum for each part ─► others add theirs
//! update ◄─ the first row of each part has the sums of the whole tensor ◄─────────┘
//! ```

use std::ops::Range;

use fusestep_launch::{
    BackendError, Batch, CHUNK_ELEMENTS, CHUNK_UNITS, Launch, LaunchReport, MAX_SUMS, ROW_VALUES,
    TensorSums, UnitSums, fold_units, pack_tensors, tree_sum,
};

use super::{LendOnDevice, check_records_of, look_up};
use crate::backend::CudaBackend;
use crate::checks::check_end;
use crate::leaves::check_without_tensor_sums;
use crate::normed::{self, row_count, workspace};
use crate::tensor_sums::{Place, enqueue_parts_with, normed_of, write_tensor_sums};

/// Takes the sums of a launch's kernel over each borrowed tensor, under the control block at this
/// address. Waits for the device.
pub(super) fn measure(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    control: u64,
    lend: LendOnDevice<'_>,
    sums: &mut [[f64; MAX_SUMS]],
) -> Result<(), BackendError> {
    check_without_tensor_sums(launch)?;
    check_records_of(backend, launch)?;
    let (normed, chunks) = (normed_of(launch)?, row_count(launch)?);
    let width = size_of::<[f64; MAX_SUMS]>() as u64;
    check_end(launch.members.len() as u64 * width, size_of_val(sums))?;
    let mut tensors = backend.borrowed();
    look_up(backend, launch, lend, &mut tensors)?;
    let tensors = &tensors[..];
    let pack = |batch: &Batch, bytes: &mut [u8]| {
        pack_tensors(launch, batch, tensors, control, bytes);
    };
    let address = backend.rows(chunks)?;
    for (index, batch) in launch.batches.iter().enumerate() {
        let workspace = workspace(launch, index, address);
        let name = normed.sums_and_update().sums;
        normed::enqueue(backend, launch, name, batch, workspace, &pack)?;
    }
    let mut rows = vec![[0.0; ROW_VALUES as usize]; chunks as usize];
    backend.kernels().rows.read(bytemuck::cast_slice_mut(&mut rows))?;
    sums.fill([0.0; MAX_SUMS]);
    for (tensor, own) in rows_of_tensors(launch.batches) {
        let own = &rows[own];
        sums[tensor] = tree_sum(own.len(), |chunk| sums_of(&own[chunk]));
    }
    Ok(())
}

/// The sums of a chunk: its row has those of its units, side by side.
fn sums_of(row: &[f64; ROW_VALUES as usize]) -> [f64; MAX_SUMS] {
    std::array::from_fn(|sum| {
        let units: UnitSums = std::array::from_fn(|unit| row[unit * MAX_SUMS + sum]);
        fold_units(&units)
    })
}

const _: () = assert!(CHUNK_UNITS * MAX_SUMS as u64 <= ROW_VALUES, "rows have all sums");

/// The rows of each tensor of a launch, whose chunks follow each other over all batches.
fn rows_of_tensors(batches: &[Batch]) -> Vec<(usize, Range<usize>)> {
    let mut found: Vec<(usize, Range<usize>)> = Vec::new();
    let mut next = 0;
    for record in batches.iter().flat_map(|batch| &batch.records) {
        let end = next + record.numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize;
        match found.last_mut() {
            Some((tensor, rows)) if *tensor == record.tensor as usize => rows.end = end,
            _ => found.push((record.tensor as usize, next..end)),
        }
        next = end;
    }
    found
}

/// Enqueues a launch that has the sums over whole tensors, under the control block at this address.
pub(super) fn launch(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    control: u64,
    lend: LendOnDevice<'_>,
) -> Result<LaunchReport, BackendError> {
    let Some(TensorSums::Host(sums)) = launch.tensor_sums else {
        check_without_tensor_sums(launch)?;
        return Ok(LaunchReport::default());
    };
    check_records_of(backend, launch)?;
    let (normed, chunks) = (normed_of(launch)?, row_count(launch)?);
    let mut tensors = backend.borrowed();
    look_up(backend, launch, lend, &mut tensors)?;
    let tensors = &tensors[..];
    let rows = write_tensor_sums(backend, launch, chunks, sums)?;
    let (name, place) = (normed.sums_and_update().update, Place { rows, first_row: 0 });
    enqueue_parts_with(backend, launch, name, launch.batches, place, &|batch, bytes| {
        pack_tensors(launch, batch, tensors, control, bytes);
    })?;
    Ok(LaunchReport::of(launch.batches))
}
