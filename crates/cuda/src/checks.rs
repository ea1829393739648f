//! Checks before a launch, of faults that a device would notice late, or not at all.

use fusestep_launch::{BackendError, Batch, Launch, ListBuffer};

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
            let element_bytes = list.dtype().len_bytes() as u64;
            let first = firsts.get(index).copied().unwrap_or(0);
            let place = element.wrapping_sub(first);
            let end = place.saturating_add(record.numel).saturating_mul(element_bytes);
            if end > list.buffer.len_bytes() as u64 {
                return Err(BackendError::OutOfBounds {
                    backend: NAME,
                    offset_bytes: saturate(place.saturating_mul(element_bytes)),
                    len_bytes: saturate(record.numel.saturating_mul(element_bytes)),
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
