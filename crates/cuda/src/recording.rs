//! Work while a framework records a graph of its stream.
//!
//! What is enqueued on that stream is part of the graph. What a launch needs besides, such as
//! memory for its table, is made on a stream aside, which no graph records.

use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUstreamCaptureMode};
use fusestep_launch::BackendError;

use crate::Result;
use crate::backend::CudaBackend;
use crate::handles::StreamHandle;
use crate::status::{check, wrapped};

/// Permission of this thread to call what may wait for the device while others record, until this
/// is dropped. The driver otherwise spoils every recording that asks for it, as PyTorch's do.
struct Relaxed(CUstreamCaptureMode);

impl Relaxed {
    fn begin() -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        exchange(&mut mode)?;
        Ok(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // An error has no one to go to here; the call takes any mode that it has given.
        let _ = exchange(&mut self.0);
    }
}

fn exchange(mode: &mut CUstreamCaptureMode) -> Result<()> {
    // SAFETY: reads and writes one value.
    let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) };
    check(status, || "changing the thread's mode beside recordings".to_owned())
}

/// Does `work`, as [`CudaBackend::beside_recordings`] says.
pub(crate) fn beside<T, E: From<BackendError>>(
    backend: &CudaBackend,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    backend.session.enter()?;
    let _relaxed = Relaxed::begin()?;
    work()
}

/// Does `work`, as [`CudaBackend::recorded_on`] says.
///
/// # Safety
/// As there.
pub(crate) unsafe fn recorded_on<T, E: From<BackendError>>(
    backend: &CudaBackend,
    stream: StreamHandle,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    backend.session.enter()?;
    let _relaxed = Relaxed::begin()?;
    // SAFETY: the caller's.
    unsafe { backend.session.on(stream.0.cast(), work) }
}

/// Does `work`, whose calls go on a stream of their own, and waits for it. Others may record
/// meanwhile.
pub(crate) fn aside<T>(backend: &CudaBackend, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let session = &backend.session;
    session.enter()?;
    let _relaxed = Relaxed::begin()?;
    let making = || "creating a stream".to_owned();
    let stream = wrapped(Stream::new(StreamFlags::NON_BLOCKING, None), making)?;
    // SAFETY: it lives until the end of this call, in the context that was entered.
    unsafe {
        session.on(stream.as_inner(), || {
            let done = work()?;
            session.synchronize()?;
            Ok(done)
        })
    }
}
