//! Tensors of PyTorch on a CUDA device, updated where PyTorch keeps them.
//!
//! A step is enqueued on PyTorch's own stream, behind its backward pass and before its next work.
//! Where PyTorch works on another stream than at first, events order the two; the host waits for
//! neither.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::SharedBackend;
use fusestep::launch::{Backend, BackendError, Buffer, Launch, LaunchReport, Reduce};
use fusestep::planner::Brought;
use fusestep::tensor::Role;
pub(crate) use fusestep_cuda::ContextBefore;
use fusestep_cuda::{CudaBackend, DeviceTensor, HostCopy, StreamHandle};
use pyo3::prelude::*;

use crate::errors::failed;
use crate::stream::{LendPlace, Stream};

/// A CUDA device, and the stream on which steps run there.
#[derive(Clone, Debug)]
pub(crate) struct OnCuda {
    backend: Arc<CudaBackend>,
    /// The stream of the backend; `None` for one of its own.
    stream: Option<StreamHandle>,
}

/// Backends that were made, with their devices: what is loaded on a device is loaded once.
static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());

struct Made {
    ordinal: u32,
    on: OnCuda,
}

impl OnCuda {
    /// The device with this number, on a stream that stays, or on one of the backend's own.
    pub(crate) fn open(ordinal: u32, stream: Stream) -> PyResult<Self> {
        let _before = ContextBefore::remember();
        let stream = Some(handle_of(stream)).filter(|handle| {
            // The per-thread stream is another one on each thread.
            stream.stays && *handle != StreamHandle::PER_THREAD
        });
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |made: &&Made| (made.ordinal, made.on.stream) == (ordinal, stream);
        if let Some(made) = made.iter().find(fits) {
            return Ok(made.on.clone());
        }
        let backend = match stream {
            // SAFETY: a stream of PyTorch's, which it makes once and never destroys, as `stays`
            // says, and which it has for this device. PyTorch's driver is this program's.
            Some(stream) => unsafe { CudaBackend::adopt_on(ordinal, stream) },
            None => CudaBackend::open(ordinal),
        };
        let on = Self { backend: Arc::new(backend.map_err(failed)?), stream };
        made.push(Made { ordinal, on: on.clone() });
        Ok(on)
    }

    pub(crate) fn backend(&self) -> SharedBackend {
        Arc::clone(&self.backend) as SharedBackend
    }

    pub(crate) fn as_backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Does `work` behind what is enqueued on `stream`, and before what will be.
    pub(crate) fn ordered<T, E: From<BackendError>>(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let _before = ContextBefore::remember();
        let stream = handle_of(stream);
        if self.stream == Some(stream) {
            return work();
        }
        // SAFETY: the stream on which PyTorch works now, of this device's primary context.
        unsafe { self.backend.wait_for(stream) }?;
        let done = work();
        // After a failure, too: some of the work may be enqueued.
        // SAFETY: as above.
        let waits = unsafe { self.backend.make_wait(stream) };
        let done = done?;
        waits?;
        Ok(done)
    }

    /// Enqueues a launch on borrowed tensors.
    pub(crate) fn launch(
        &self,
        places: LendPlace<'_>,
        launch: Launch<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| borrowed(places, parameter, role);
        self.backend.launch_borrowed(launch, &mut lend)
    }

    /// Begins to bring bytes to the host, behind what is enqueued by now.
    pub(crate) fn bring(
        &self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<Box<dyn Brought>, BackendError> {
        Ok(Box::new(OnTheWay(self.backend.begin_read(buffer, len_bytes)?)))
    }

    /// Enqueues a read of borrowed gradients.
    pub(crate) fn reduce(
        &self,
        places: LendPlace<'_>,
        reduce: Reduce<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| borrowed(places, parameter, role);
        self.backend.reduce_borrowed(reduce, &mut lend)
    }
}

/// Bytes that a device copies to the host.
struct OnTheWay(HostCopy);

impl Brought for OnTheWay {
    fn wait(self: Box<Self>) -> Result<Vec<u8>, BackendError> {
        self.0.wait()
    }
}

fn handle_of(stream: Stream) -> StreamHandle {
    StreamHandle(ptr::with_exposed_provenance_mut::<c_void>(stream.handle))
}

/// The tensor of a role of one parameter.
fn borrowed(places: LendPlace<'_>, parameter: u32, role: Role) -> Option<DeviceTensor> {
    let place = places(parameter, role)?;
    // SAFETY: places are those of a `Loan`, whose maker promises initialised memory of this device
    // that is kept. PyTorch frees memory in the order of the stream that it had it for, which is
    // the one that the step is ordered with. `Checked` has found that what is written overlaps
    // nothing else.
    Some(unsafe { DeviceTensor::at(place.address as u64, place.len_bytes) })
}
