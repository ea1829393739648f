//! Sums over what a launch changes, in the device's memory.

use fusestep_launch::{BackendError, CHUNK_ELEMENTS, Launch, UnitSums};

use crate::backend::CudaBackend;
use crate::normed::check_chunks;
use crate::reduce::check_end;
use crate::session::unavailable;

impl CudaBackend {
    /// The address of the launch's slots; 0 if it leaves no sums.
    pub(crate) fn update_sums_address(&self, launch: &Launch<'_>) -> Result<u64, BackendError> {
        match &launch.update_sums {
            Some(sums) => Ok(self.device_buffer(&*sums.slots)?.address()),
            None => Ok(0),
        }
    }
}

/// Refuses a launch that leaves sums and whose table is in its arguments: there are entries for
/// tables in memory only.
pub(crate) fn check_without_update_sums(launch: &Launch<'_>) -> Result<(), BackendError> {
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
/// slots.
pub(crate) fn check_update_sums(launch: &Launch<'_>) -> Result<(), BackendError> {
    let Some(sums) = &launch.update_sums else {
        return Ok(());
    };
    check_chunks(launch)?;
    for record in launch.batches.iter().flat_map(|batch| &batch.records) {
        let slot = sums.slot(record.tensor, record.first_element);
        let chunks = record.numel.div_ceil(u64::from(CHUNK_ELEMENTS));
        let end = slot.saturating_add(chunks);
        let end_bytes = end.saturating_mul(size_of::<UnitSums>() as u64);
        check_end(end_bytes, sums.slots.len_bytes())?;
    }
    Ok(())
}
