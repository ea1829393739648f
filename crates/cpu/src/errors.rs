//! Errors of the backend.

use fusestep_launch::BackendError;

/// Name of the backend in errors.
pub(crate) const NAME: &str = "cpu";

/// Error for memory that is not the host's.
pub(crate) const FOREIGN: BackendError = BackendError::ForeignBuffer { backend: NAME };

/// The error for `len_bytes` bytes from `offset_bytes` on in memory of `found` bytes.
pub(crate) fn out_of_bounds(offset_bytes: usize, len_bytes: usize, found: usize) -> BackendError {
    BackendError::OutOfBounds { backend: NAME, offset_bytes, len_bytes, found }
}
