//! Handles of the driver that a framework made.

use std::ffi::c_void;
use std::ptr;

/// A `CUcontext` of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextHandle(pub *mut c_void);

/// A `CUstream` of the driver, which is a `cudaStream_t` of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(pub *mut c_void);

impl StreamHandle {
    /// The legacy default stream, which is the same on all threads.
    pub const LEGACY: Self = Self(ptr::null_mut());

    /// `CU_STREAM_PER_THREAD`, which is another stream on every thread.
    pub const PER_THREAD: Self = Self(ptr::without_provenance_mut(2));

    /// `CU_STREAM_LEGACY`, the other handle of the legacy default stream.
    const LEGACY_BY_NAME: Self = Self(ptr::without_provenance_mut(1));

    pub(crate) fn is_legacy(self) -> bool {
        self == Self::LEGACY || self == Self::LEGACY_BY_NAME
    }
}

// SAFETY: a handle is a name; only calls of the driver look behind it, and those are unsafe or in
// `Session`, whose maker was promised that it lives. The driver takes it on any thread.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}
