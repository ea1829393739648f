//! The role of memory, which every backend has.

use crate::{BackendError, Buffer, LaunchLimits};

/// Memory of a backend, and the limits of launches on it.
pub trait Memory {
    /// The backend's name: `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// Limits of one launch on this backend.
    fn limits(&self) -> LaunchLimits;

    /// Allocates zeroed memory aligned to 256 bytes; 0 bytes are allowed.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] with the length asked for.
    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError>;

    /// Copies host bytes into `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if they do not fit; nothing is written then.
    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError>;

    /// Copies bytes of `buffer` from `offset_bytes` on to the host.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if `buffer` is shorter.
    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError>;

    /// Copies bytes between two buffers of this backend. A device copies them itself, and the call
    /// returns when the copy is enqueued.
    ///
    /// # Errors
    /// As [`Memory::read`] and [`Memory::write`].
    fn copy(
        &self,
        from: &dyn Buffer,
        from_offset_bytes: usize,
        to: &mut dyn Buffer,
        to_offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<(), BackendError> {
        if let Some(bytes) = from.host() {
            let end = from_offset_bytes.saturating_add(len_bytes);
            let own = bytes.get(from_offset_bytes..end);
            let own = own.ok_or(BackendError::OutOfBounds {
                backend: self.name(),
                offset_bytes: from_offset_bytes,
                len_bytes,
                found: bytes.len(),
            })?;
            return self.write(to, to_offset_bytes, own);
        }
        let mut staged = vec![0; len_bytes];
        self.read(from, from_offset_bytes, &mut staged)?;
        self.write(to, to_offset_bytes, &staged)
    }

    /// Sets all bytes of a buffer to 0, in the order of what is enqueued.
    ///
    /// # Errors
    /// As [`Memory::write`].
    fn zero(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        let zeros = vec![0; buffer.len_bytes()];
        self.write(buffer, 0, &zeros)
    }

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn synchronize(&self) -> Result<(), BackendError>;
}
