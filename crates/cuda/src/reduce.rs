//! Reductions and their conclusion on the device.

use fusestep_launch::{
    BackendError, Batch, Conclude, LaunchReport, ListBuffer, Reduce, SquareSum, TensorPartials,
    pack_conclusion, pack_reduction,
};

use crate::backend::CudaBackend;
use crate::checks::{check_end, check_records};
use crate::entry::{BLOCK_THREADS, Entry, threads_for};
use crate::{NAME, Result, checks};

/// Enqueues the batches of a reduction, one launch each.
pub(crate) fn reduce(
    backend: &CudaBackend,
    reduce: Reduce<'_>,
) -> Result<LaunchReport, BackendError> {
    let read = read_list(&reduce)?;
    let list = backend.address(read.buffer.as_ref())?;
    for batch in reduce.batches {
        check_records(std::slice::from_ref(read), &[], reduce.offsets, batch)?;
    }
    let (kernel, offsets) = (reduce.kernel, reduce.offsets);
    enqueue_batches(backend, &reduce, &|batch, partials, bytes| {
        pack_reduction(kernel, batch, offsets, list, partials, bytes);
    })
}

/// Enqueues all batches of a reduction, whose records have been checked; `pack` writes the
/// arguments of one, whose first partial sum lies at the address that it is given.
pub(crate) fn enqueue_batches(
    backend: &CudaBackend,
    reduce: &Reduce<'_>,
    pack: &dyn Fn(&Batch, u64, &mut [u8]),
) -> Result<LaunchReport, BackendError> {
    let partials = backend.address(&*reduce.partials)?;
    let chunks: u64 = reduce.batches.iter().map(|b| u64::from(b.chunks)).sum();
    let width = size_of::<SquareSum>() as u64;
    let end = reduce.first_partial.saturating_add(chunks);
    check_end(end.saturating_mul(width), reduce.partials.len_bytes())?;
    let layout = reduce.kernel.argument_layout();
    for batch in reduce.batches {
        checks::check_arguments(backend, layout.bytes(batch.records.len(), 0))?;
    }
    let mut next = reduce.first_partial;
    for batch in reduce.batches.iter().filter(|batch| batch.chunks > 0) {
        let entry = Entry {
            stem: reduce.kernel.stem(),
            entry: reduce.kernel.entry(),
            threads: threads_for(batch),
            blocks: batch.chunks,
        };
        let own = partials + next * width;
        entry.enqueue(backend, &mut |bytes| pack(batch, own, bytes))?;
        next += u64::from(batch.chunks);
    }
    Ok(LaunchReport { launches: reduce.batches.len() as u64, elements: 0 })
}

/// Enqueues a conclusion: one block.
pub(crate) fn conclude(
    backend: &CudaBackend,
    conclude: Conclude<'_>,
) -> Result<LaunchReport, BackendError> {
    let addresses = [
        backend.address(conclude.partials)?,
        backend.address(conclude.tensors)?,
        backend.address(conclude.sums)?,
    ];
    let control = backend.control_address(Some(&*conclude.control))?;
    let tensors = conclude.tensors.len_bytes() / size_of::<TensorPartials>();
    let sums_end = tensors * size_of::<SquareSum>();
    check_end(sums_end as u64, conclude.sums.len_bytes())?;
    let scalars = conclude.scalars;
    let entry = Entry {
        stem: conclude.rule.stem(),
        entry: conclude.rule.entry(),
        threads: BLOCK_THREADS,
        blocks: 1,
    };
    entry.enqueue(backend, &mut |bytes| {
        pack_conclusion(addresses, tensors as u64, control, scalars, bytes);
    })?;
    Ok(LaunchReport { launches: 1, elements: 0 })
}

/// The list that a reduction reads, unless its tensors are borrowed.
pub(crate) fn read_list<'a>(reduce: &Reduce<'a>) -> Result<&'a ListBuffer, BackendError> {
    reduce.list.ok_or(BackendError::ForeignBuffer { backend: NAME })
}
