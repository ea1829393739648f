//! Why a backend could not do what was asked.

/// Error of a backend that could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Memory could not be had.
    #[error(
        "{backend}: expected {len_bytes} bytes of memory, found less; use a smaller model or \
         shard its state"
    )]
    OutOfMemory {
        /// The backend.
        backend: &'static str,
        /// Bytes asked for.
        len_bytes: usize,
    },
    /// A copy reaches beyond its buffer.
    #[error(
        "{backend}: copy of {len_bytes} bytes at offset {offset_bytes}: expected a buffer of at \
         least that length, found {found} bytes"
    )]
    OutOfBounds {
        /// The backend.
        backend: &'static str,
        /// First byte.
        offset_bytes: usize,
        /// Bytes to copy.
        len_bytes: usize,
        /// The buffer's length in bytes.
        found: usize,
    },
    /// A buffer of another backend was given.
    #[error(
        "{backend}: expected a buffer allocated by this backend, found another's; allocate the \
         state with the backend that runs it"
    )]
    ForeignBuffer {
        /// The backend.
        backend: &'static str,
    },
    /// A table was given that was built by another backend or from other memory.
    #[error(
        "{backend}: expected a table built here from these lists, found another; place it again"
    )]
    ForeignTable {
        /// The backend.
        backend: &'static str,
    },
    /// There is no such device, or the build leaves it out.
    #[error("{backend}: {reason}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// Text that says what is missing and what would work.
        reason: String,
    },
    /// The device reported an error.
    #[error("{backend}: {operation} failed with code {code}: {text}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// The operation that failed.
        operation: String,
        /// The device's own code.
        code: i64,
        /// The device's own text.
        text: String,
    },
}
