//! Launches recorded once and enqueued together by one call.

use std::ptr;
use std::sync::{Arc, Mutex};

use cust::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};
use fusestep_launch::{BackendError, Graph};

use crate::Result;
use crate::backend::CudaBackend;
use crate::buffer::Allocation;
use crate::kernels::Kernels;
use crate::session::Session;
use crate::status::check;

/// A CUDA graph that can be launched.
#[derive(Debug)]
pub(crate) struct CapturedGraph {
    executable: CUgraphExec,
    session: Arc<Session>,
    /// The memory that its launches refer to.
    _memory: Vec<Arc<Allocation>>,
    /// The modules whose functions it launches.
    _kernels: Arc<Mutex<Kernels>>,
}

// SAFETY: the handle belongs to the context, not to a thread, and has one owner.
unsafe impl Send for CapturedGraph {}

/// Records what `enqueue` enqueues on this backend, from whichever thread.
pub(crate) fn record(
    backend: &CudaBackend,
    enqueue: &mut dyn FnMut() -> Result<()>,
) -> Result<CapturedGraph, BackendError> {
    backend.session.enter()?;
    *backend.recorded() = Some(Vec::new());
    // Relaxed: modules are loaded when their first function is, and that may be now.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream lives as long as the session, and its context is current.
    let status = unsafe { sys::cuStreamBeginCapture_v2(backend.session.stream(), mode) };
    let begun = check(status, || "starting to record launches".to_owned());
    if let Err(error) = begun {
        *backend.recorded() = None;
        return Err(error);
    }
    let enqueued = enqueue();
    let mut graph: CUgraph = ptr::null_mut();
    // A stream must not stay in this mode, whatever happened.
    let recording = || "recording launches".to_owned();
    // SAFETY: writes one handle; the stream records since the call above.
    let ended = backend
        .session
        .call(recording, |stream| unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
    let memory = backend.recorded().take().unwrap_or_default();
    let made = enqueued.and(ended).and_then(|()| {
        let mut executable: CUgraphExec = ptr::null_mut();
        // SAFETY: writes one handle; the graph was recorded above.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        check(status, || "making a graph of recorded launches".to_owned())?;
        Ok(executable)
    });
    if !graph.is_null() {
        // SAFETY: the handle was returned above and is destroyed once; what was made of it has
        // its own copy.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
    }
    Ok(CapturedGraph {
        executable: made?,
        session: Arc::clone(&backend.session),
        _memory: memory,
        _kernels: Arc::clone(&backend.kernels),
    })
}

impl Graph for CapturedGraph {
    fn launch(&self) -> Result<()> {
        let launching = || "launching a graph".to_owned();
        // SAFETY: the graph lives, and with it the functions and the memory that it refers to.
        self.session
            .call(launching, |stream| unsafe { sys::cuGraphLaunch(self.executable, stream) })
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        // Waits, for the memory that goes next may be in use. An error has no one to go to here.
        if self.session.synchronize().is_ok() {
            // SAFETY: the handle comes from a successful instantiation and is destroyed once.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
