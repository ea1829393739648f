//! The device of a backend: its order of work, and the roles that memory there needs.

use fusestep_launch::{Backend, BackendError, Buffer, DeviceBackend};

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
