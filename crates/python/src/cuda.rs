//! Tensors of PyTorch on a CUDA device, updated where PyTorch keeps them.
//!
//! A step is enqueued on PyTorch's own stream, behind its backward pass and before its next work.
//! Where PyTorch works on another stream than at first, events order the two; the host waits for
//! neither.

use std::ffi::c_void;
use std::mem::offset_of;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fusestep::launch::{
    Backend, BackendError, Buffer, CONTROL_BYTES, ControlBlock, DeviceStream, Launch, LaunchReport,
    MAX_SUMS, Reduce,
};
use fusestep::planner::{Brought, DerivedFrom};
use fusestep::tensor::{DeviceSliceMut, Role};
use fusestep::{Communicator, Error, SharedBackend};
use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};
pub(crate) use fusestep_cuda::ContextBefore;
use fusestep_cuda::{
    BorrowedStep, BorrowedTables, CudaBackend, DeviceTensor, HostCopy, StreamHandle,
};
use pyo3::prelude::*;

use crate::errors::failed;
use crate::stream::{Asked, LendPlace, Stream};
use crate::tensor::Place;

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

    /// Joins the ranks of `control`, each with a device of its own, by the NCCL of this file or of
    /// the system.
    pub(crate) fn join(
        &self,
        control: Box<dyn Communicator>,
        timeout: Duration,
        library: Option<PathBuf>,
    ) -> Result<Box<dyn Communicator>, Error> {
        let mut options = NcclOptions { timeout, ..NcclOptions::default() };
        if let Some(library) = library {
            options.nccl_library = library;
        }
        let number = self.backend.ordinal() as usize;
        Ok(Box::new(NcclCommunicator::new(control, number, &options)?))
    }

    /// Copies the bytes at a place of this device to lent memory.
    pub(crate) fn copy(&self, from: Place, to: DeviceSliceMut<'_>) -> Result<(), BackendError> {
        self.backend.copy_lent(number_at(from.address, from.len_bytes), to)
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

    /// Does `work`, which may wait for the device, even while PyTorch records another stream.
    pub(crate) fn waiting<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let _before = ContextBefore::remember();
        self.backend.beside_recordings(work)
    }

    /// Does `work`, whose launches PyTorch records as a part of a graph.
    pub(crate) fn recorded<T, E: From<BackendError>>(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let _before = ContextBefore::remember();
        // SAFETY: the stream on which PyTorch works now, of this device's primary context. PyTorch
        // waits for the device before it records.
        unsafe { self.backend.recorded_on(handle_of(stream), work) }
    }

    /// Enqueues a launch on borrowed tensors.
    pub(crate) fn launch(
        &self,
        places: LendPlace<'_>,
        tables: &mut Tables,
        launch: Launch<'_>,
        from: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| borrowed(places, parameter, role);
        tables.0.launch(&self.backend, launch, from.rule, from.values, &mut lend)
    }

    /// Takes the sums of a launch's kernel over borrowed tensors; waits for the device.
    pub(crate) fn measure(
        &self,
        places: LendPlace<'_>,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let mut lend = |parameter, role| borrowed(places, parameter, role);
        self.backend.measure_borrowed(launch, &mut lend, sums)
    }

    /// Begins to bring bytes to the host, behind what is enqueued by now.
    pub(crate) fn bring(
        &self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<Box<dyn Brought>, BackendError> {
        Ok(Box::new(OnTheWay(self.backend.begin_read(buffer, len_bytes)?)))
    }

    /// Begins to bring the control block at an address to the host.
    pub(crate) fn bring_control(&self, address: usize) -> Result<Box<dyn Brought>, BackendError> {
        let control = number_at(address, CONTROL_BYTES);
        Ok(Box::new(OnTheWay(self.backend.begin_read_of(control)?)))
    }

    /// Writes the factor that gradients are divided by to a plan's control block: the f64 at an
    /// address, or 1 behind a step that had one.
    pub(crate) fn scale(
        &self,
        tables: &mut Tables,
        address: Option<usize>,
        control: &mut dyn Buffer,
    ) -> Result<(), BackendError> {
        let at = offset_of!(ControlBlock, loss_scale);
        let was_scaled = std::mem::replace(&mut tables.1, address.is_some());
        match address {
            Some(address) => {
                self.backend.copy_number(number_at(address, size_of::<f64>()), control, at)
            }
            None if was_scaled => self.backend.set_number(control, at, 1.0),
            None => Ok(()),
        }
    }

    /// Enqueues a read of borrowed gradients.
    pub(crate) fn reduce(
        &self,
        places: LendPlace<'_>,
        tables: &mut Tables,
        reduce: Reduce<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| borrowed(places, parameter, role);
        tables.0.reduce(&self.backend, reduce, &mut lend)
    }
}

/// Tables of a plan's launches in the device's memory, and whether the last step had a factor that
/// gradients were divided by.
#[derive(Debug, Default)]
pub(crate) struct Tables(BorrowedTables, bool);

impl Tables {
    /// Begins a step, whose tensors lie at places of this number.
    pub(crate) fn begin(
        &mut self,
        places: u64,
        asked: Asked,
        rates: &[Option<usize>],
        records: bool,
    ) {
        let number = |address| number_at(address, size_of::<f64>());
        self.0.begin(BorrowedStep {
            places,
            is_recorded: records,
            keeps_all: asked.keeps_tables,
            rates: rates.iter().map(|rate| rate.map(number)).collect(),
            control: asked.control.map(|address| number_at(address, CONTROL_BYTES)),
        });
    }

    /// Bytes that were copied to the device for tables until now.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.0.copied_bytes()
    }

    /// Takes back the count of a step that was skipped.
    pub(crate) fn skipped(&mut self) {
        self.0.skipped();
    }

    /// Steps taken in replays since the last look.
    pub(crate) fn steps_taken(&mut self) -> Result<u64, BackendError> {
        self.0.steps_taken()
    }
}

/// Numbers of a library's at an address.
fn number_at(address: usize, len_bytes: usize) -> DeviceTensor {
    // SAFETY: the address of a tensor on this device, which Python's side of the step keeps and
    // which is ordered as parameters are.
    unsafe { DeviceTensor::at(address as u64, len_bytes) }
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
