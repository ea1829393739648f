//! Sums over what a launch changes: a launch keeps the values from before, and one behind the
//! update sums up the changes.

use fusestep_launch::{
    ArgumentLayout, BackendError, Batch, CHUNK_ELEMENTS, ChangedRecord, Launch, UnitSums,
    pack_launch_of_table, pack_update_sums,
};
use fusestep_tensor::{DType, Role};

use crate::Result;
use crate::backend::CudaBackend;
use crate::buffer::DeviceBuffer;
use crate::checks::check_end;
use crate::entry::{Entry, threads_for};
use crate::normed::{check_chunks, head_chunks, workspace};
use crate::rows::{ROW_BYTES, SKIPPED_AT};
use crate::session::unavailable;

const STEM: &str = "update_sums";

/// Alignment of each tensor's copy, so that it is accessed 16 bytes at a time.
const COPY_ALIGNMENT: u64 = 16;

/// The memory and the arguments that the sums of one batch take.
#[derive(Debug)]
pub(crate) struct PlacedSums {
    /// The copies of the values, and behind them the table.
    pub(crate) memory: DeviceBuffer,
    arguments: Vec<u8>,
    value: Value,
    threads: u32,
    blocks: u32,
}

/// The storage of a parameter's value: the entries for it, and the bytes of a copy.
#[derive(Clone, Copy, Debug)]
struct Value {
    keep: &'static str,
    sum: &'static str,
    copy_bytes: u64,
}

/// The two launches of one batch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SumsPart {
    /// Keeps the values, before the update.
    Keep,
    /// Sums up the changes, behind the update.
    Sum,
}

/// The address of the launch's rows; 0 if it leaves no sums.
pub(crate) fn address_of(backend: &CudaBackend, launch: &Launch<'_>) -> Result<u64, BackendError> {
    match &launch.update_sums {
        Some(sums) => backend.address(&*sums.rows),
        None => Ok(0),
    }
}

/// Places the memory and the arguments of a batch's sums, if the launch leaves some. `addresses`
/// are those of the lists, `control` and `sums` those of control block and rows. `tensor_rows` is
/// that of the sums that the kernel itself takes of tensors, if it does.
pub(crate) fn place(
    backend: &CudaBackend,
    launch: &Launch<'_>,
    index: usize,
    addresses: &[u64],
    control: u64,
    sums: u64,
    tensor_rows: Option<u64>,
) -> Result<Option<PlacedSums>, BackendError> {
    if launch.update_sums.is_none() {
        return Ok(None);
    }
    let batch = &launch.batches[index];
    let (value, lists) = value_of(launch)?;
    let lists: Vec<_> = lists.into_iter().map(|list| (list, addresses[list])).collect();
    let mut kept_bytes = 0;
    let mut changed = changed_records(launch, index, tensor_rows);
    for (record, changed) in batch.records.iter().zip(&mut changed) {
        changed.kept = kept_bytes;
        kept_bytes += (record.numel * value.copy_bytes).next_multiple_of(COPY_ALIGNMENT);
    }
    let table_bytes = pack_update_sums(launch, batch, &lists, control, sums, &changed).len();
    let too_large = || BackendError::OutOfMemory { backend: crate::NAME, len_bytes: usize::MAX };
    let kept_end = usize::try_from(kept_bytes).map_err(|_| too_large())?;
    let len_bytes = kept_end.checked_add(table_bytes).ok_or_else(too_large)?;
    let mut memory = DeviceBuffer::zeroed(&backend.session, len_bytes)?;
    for changed in &mut changed {
        changed.kept += memory.address();
    }
    let table = pack_update_sums(launch, batch, &lists, control, sums, &changed);
    memory.write(kept_end, &table)?;
    let layout = ArgumentLayout { lists: 0, scalar_bytes: size_of::<u64>(), step_scalar_bytes: 0 };
    Ok(Some(PlacedSums {
        arguments: pack_launch_of_table(&table, layout, memory.address() + kept_bytes),
        memory,
        value,
        threads: threads_for(batch),
        blocks: batch.chunks,
    }))
}

pub(crate) fn enqueue(backend: &CudaBackend, sums: &PlacedSums, part: SumsPart) -> Result<()> {
    let entry = Entry {
        stem: STEM,
        entry: match part {
            SumsPart::Keep => sums.value.keep,
            SumsPart::Sum => sums.value.sum,
        },
        threads: sums.threads,
        blocks: sums.blocks,
    };
    entry.enqueue_packed(backend, &sums.arguments)
}

/// For every record of a batch the address of the kernel's note that it has skipped the tensor. The
/// note is in the row of the tensor's first chunk.
fn changed_records(
    launch: &Launch<'_>,
    index: usize,
    tensor_rows: Option<u64>,
) -> Vec<ChangedRecord> {
    let batch: &Batch = &launch.batches[index];
    let records = batch.records.iter().enumerate();
    let changed = records.map(|(place, record)| {
        let skipped = tensor_rows.map_or(0, |rows| {
            let head = if place == 0 { head_chunks(batch) } else { 0 };
            let first = workspace(launch, index, rows).first_row;
            let row = u64::from(first) + u64::from(record.first_chunk) - head;
            rows + row * ROW_BYTES as u64 + SKIPPED_AT as u64
        });
        ChangedRecord { kept: 0, skipped }
    });
    changed.collect()
}

/// The storage of the launch's parameters, and the lists that have their values.
fn value_of(launch: &Launch<'_>) -> Result<(Value, Vec<usize>), BackendError> {
    let place = |role| launch.lists.iter().position(|list| list.role() == role);
    let value = |keep, sum, copy_bytes| Value { keep, sum, copy_bytes };
    let missing = || {
        unavailable(format!(
            "`{}`: expected a list of parameters to sum up the changes of, found none",
            launch.kernel.entry()
        ))
    };
    if let Some(master) = place(Role::Master) {
        let value = value("update_sums_keep_f32", "update_sums_f32", 4);
        return Ok((value, vec![master]));
    }
    let param = place(Role::Param).ok_or_else(missing)?;
    if let Some(remainder) = place(Role::Remainder) {
        let value = match launch.lists[remainder].dtype() {
            DType::U8 => value("update_sums_keep_bf16_r8", "update_sums_bf16_r8", 4),
            _ => value("update_sums_keep_bf16_r16", "update_sums_bf16_r16", 4),
        };
        return Ok((value, vec![param, remainder]));
    }
    let value = match launch.lists[param].dtype() {
        DType::F32 => value("update_sums_keep_f32", "update_sums_f32", 4),
        DType::F64 => value("update_sums_keep_f64", "update_sums_f64", 8),
        DType::F16 => value("update_sums_keep_f16", "update_sums_f16", 4),
        DType::BF16 => value("update_sums_keep_bf16", "update_sums_bf16", 4),
        _ => return Err(missing()),
    };
    Ok((value, vec![param]))
}

/// Refuses a launch that leaves sums and whose table is in its arguments: the copies of the values
/// are made for tables in memory only.
pub(crate) fn check_without_update_sums(launch: &Launch<'_>) -> Result<()> {
    match launch.update_sums {
        None => Ok(()),
        Some(_) => Err(unavailable(format!(
            "`{}`: expected a table in the device's memory for a launch that leaves sums over \
             what it changes, found one in arguments; plan with resident tables",
            launch.kernel.entry()
        ))),
    }
}

/// Refuses a launch whose chunks are not those of the sums, or that would leave one behind its
/// rows.
pub(crate) fn check_update_sums(launch: &Launch<'_>) -> Result<()> {
    let Some(sums) = &launch.update_sums else {
        return Ok(());
    };
    check_chunks(launch)?;
    for record in launch.batches.iter().flat_map(|batch| &batch.records) {
        let row = sums.row(record.tensor, record.first_element);
        let chunks = record.numel.div_ceil(u64::from(CHUNK_ELEMENTS));
        let end = row.saturating_add(chunks);
        let end_bytes = end.saturating_mul(size_of::<UnitSums>() as u64);
        check_end(end_bytes, sums.rows.len_bytes())?;
    }
    Ok(())
}
