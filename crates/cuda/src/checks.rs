//! Checks before a launch, of faults that a device would notice late, or not at all.

use fusestep_launch::{BackendError, Batch, Launch, ListBuffer};
use fusestep_tensor::UNIT_ELEMENTS;

use crate::backend::CudaBackend;
use crate::entry::GRID_MAX;
use crate::session::unavailable;
use crate::{NAME, Result};

/// Refuses a batch whose arguments no launch carries.
pub(crate) fn check_arguments(backend: &CudaBackend, len_bytes: usize) -> Result<()> {
    let most = backend.session.info.argument_bytes;
    if len_bytes <= most {
        return Ok(());
    }
    Err(unavailable(format!(
        "a batch has {len_bytes} argument bytes, this device takes {most}; plan with the \
         limits of the backend"
    )))
}

/// Refuses chunks that cut a group of elements that share a unit: two blocks would write it.
pub(crate) fn check_groups(launch: &Launch<'_>) -> Result<()> {
    let chunk_elements = launch.limits.chunk_elements;
    let is_coded = launch.kernel.lists().iter().any(|list| list.role.unit_of().is_some());
    if !is_coded || u64::from(chunk_elements).is_multiple_of(UNIT_ELEMENTS) {
        return Ok(());
    }
    Err(unavailable(format!(
        "`{}` is cut at multiples of {UNIT_ELEMENTS} elements, the launch has chunks of \
         {chunk_elements}; make batches with `limits.of(kernel)`",
        launch.kernel.entry()
    )))
}

/// Bytes of the arguments of a batch.
pub(crate) fn argument_bytes(launch: &Launch<'_>, batch: &Batch) -> usize {
    let layout = launch.kernel.argument_layout();
    layout.bytes(batch.records.len(), batch.groups.len())
}

/// Refuses a batch that is too large for one grid or that reaches beyond a buffer. `firsts` are
/// those of [`Launch::firsts`].
pub(crate) fn check_records(
    lists: &[ListBuffer],
    firsts: &[u64],
    offsets: &[u64],
    batch: &Batch,
) -> Result<()> {
    if batch.chunks > GRID_MAX {
        return Err(unavailable(format!(
            "a batch has {} chunks, a launch takes {GRID_MAX}; plan with the limits of the backend",
            batch.chunks
        )));
    }
    for record in &batch.records {
        let element = offsets
            .get(record.tensor as usize)
            .copied()
            .unwrap_or(u64::MAX)
            .saturating_add(record.first_element);
        for (index, list) in lists.iter().enumerate() {
            let stride = list.stride();
            let first = firsts.get(index).copied().unwrap_or(0);
            let place = element.wrapping_sub(first);
            if stride.bytes(place.saturating_add(record.numel)) > list.buffer.len_bytes() as u64 {
                return Err(BackendError::OutOfBounds {
                    backend: NAME,
                    offset_bytes: saturate(stride.bytes(place)),
                    len_bytes: saturate(stride.bytes(record.numel)),
                    found: list.buffer.len_bytes(),
                });
            }
        }
    }
    Ok(())
}

/// Refuses a buffer that ends before `end` bytes.
pub(crate) fn check_end(end: u64, found: usize) -> Result<()> {
    if end <= found as u64 {
        return Ok(());
    }
    Err(BackendError::OutOfBounds {
        backend: NAME,
        offset_bytes: 0,
        len_bytes: usize::try_from(end).unwrap_or(usize::MAX),
        found,
    })
}

pub(crate) fn saturate(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
