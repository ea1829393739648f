//! The device of a backend: its order of work, and the roles that memory there needs.

use fusestep_coalesce::HostMemory;
use fusestep_launch::{Backend, BackendError, Buffer, DeviceBackend};

use crate::error::Result as PlanResult;

/// Makes a buffer ready for calls on the backend's device. A backend of the host has no order of
/// work to keep.
pub(crate) fn hand_over(
    backend: &dyn Backend,
    buffer: &mut dyn Buffer,
) -> Result<(), BackendError> {
    backend.device().map_or(Ok(()), |device| device.hand_over(buffer))
}

/// Lets launches on the backend's device follow calls on a buffer that was handed over.
pub(crate) fn take_back(
    backend: &dyn Backend,
    buffer: &mut dyn Buffer,
) -> Result<(), BackendError> {
    backend.device().map_or(Ok(()), |device| device.take_back(buffer))
}

/// A copy of a device's buffer in host memory, for calls that are made there.
pub(crate) fn staged(backend: &dyn Backend, buffer: &dyn Buffer) -> PlanResult<HostMemory> {
    let mut staged = HostMemory::zeroed(buffer.len_bytes())?;
    backend.read(buffer, 0, staged.bytes_mut())?;
    Ok(staged)
}

/// The device that sums of gradients lie on.
///
/// # Errors
/// [`BackendError::Unavailable`] on a backend of the host, which sums them up in place.
pub(crate) fn of_sums(backend: &dyn Backend) -> Result<&dyn DeviceBackend, BackendError> {
    backend.device().ok_or_else(|| BackendError::Unavailable {
        backend: backend.name(),
        reason: "expected gradients on a device; those of the host are summed up in place"
            .to_owned(),
    })
}

/// The device that resident tables lie on.
///
/// # Errors
/// [`BackendError::ForeignTable`] on a backend of the host, which has built none of them.
pub(crate) fn of_tables(backend: &dyn Backend) -> Result<&dyn DeviceBackend, BackendError> {
    backend.device().ok_or(BackendError::ForeignTable { backend: backend.name() })
}
