//! Variables and gradients on a CUDA device, updated where candle keeps them.
//!
//! candle works on one stream, by default the calling thread's own. The optimizer works on another,
//! or on candle's if candle has made a stream. Three things keep the work of both in order:
//!
//! - events between the two streams: the update waits for the backward pass, and candle's next work
//!   waits for the update; the host waits for neither.
//! - cudarc's guards, by which candle's stream and other streams that use a tensor wait for each
//!   other. They do something only once the context has several streams.
//! - candle's locks: storages are locked for reading while addresses are in use, so none is
//!   replaced. Their memory is freed behind the work enqueued on the stream.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
use candle_core::{
    CpuStorage, CudaStorage, Device, DeviceLocation, InplaceOp1, Layout, Storage, Tensor, Var,
};
use fusestep::{Session, SharedBackend};
use fusestep_cuda::{
    BorrowedStep, BorrowedTables, ContextHandle, CudaBackend, DeviceTensor, StreamHandle,
};
use fusestep_launch::{Backend, BackendError, Launch, LaunchReport, Reduce};
use fusestep_planner::{DerivedFrom, Lender, StepReport};
use fusestep_tensor::Role;

use crate::lend::bytes_mut;
use crate::{AdapterError, Options};

/// Backend that updates candle's variables on one CUDA device.
#[derive(Debug)]
pub(crate) struct OnCuda {
    backend: Arc<CudaBackend>,
    tables: Box<Mutex<Kept>>,
    /// Device of candle; declared behind the backend, which may use this device's stream.
    device: CudaDevice,
}

/// Tables of the steps' launches in the device's memory, and where the tensors lie that they have.
#[derive(Debug, Default)]
struct Kept {
    tables: BorrowedTables,
    /// Addresses of each variable and its gradient, both 0 without one.
    addresses: Vec<[u64; 2]>,
    /// Number of these addresses among all that steps have had.
    number: u64,
}

impl Kept {
    /// Begins a step on these tensors.
    fn begin(&mut self, places: &[Option<Place<'_>>]) {
        let addresses = |place: &Option<Place<'_>>| {
            place.as_ref().map_or([0; 2], |own| [own.param.address(), own.grad.address()])
        };
        let now = places.iter().map(addresses);
        if self.number == 0 || !now.clone().eq(self.addresses.iter().copied()) {
            self.addresses = now.collect();
            self.number += 1;
        }
        self.tables.begin(BorrowedStep { places: self.number, ..BorrowedStep::default() });
    }
}

impl OnCuda {
    pub(crate) fn of(device: &CudaDevice, options: &Options) -> Result<Self, AdapterError> {
        if options.update_norms {
            return Err(AdapterError::Option {
                option: "update_norms",
                expected: "variables on the cpu",
                found: "variables on a CUDA device".to_owned(),
            });
        }
        let stream = device.cuda_stream();
        let handle = handle_of(&stream);
        let backend = if handle == StreamHandle::PER_THREAD {
            let DeviceLocation::Cuda { gpu_id } = device.location() else {
                return Err(AdapterError::Candle("a CUDA device without a number".to_owned()));
            };
            // The primary context, which candle uses, too.
            CudaBackend::open(u32::try_from(gpu_id).unwrap_or(u32::MAX))?
        } else {
            let context = ContextHandle(stream.context().cu_ctx().cast());
            // SAFETY: cudarc's own handles of the driver; `self.device` keeps the stream, and
            // the session is dropped before it, as `Fused` declares them.
            unsafe { CudaBackend::adopt(context, handle) }?
        };
        let (backend, tables) = (Arc::new(backend), Box::default());
        Ok(Self { backend, tables, device: device.clone() })
    }

    pub(crate) fn backend(&self) -> SharedBackend {
        Arc::clone(&self.backend) as SharedBackend
    }

    pub(crate) fn has(&self, device: &Device) -> bool {
        matches!(device, Device::Cuda(other) if other.same_device(&self.device))
    }

    /// Runs one step; see the [module](self).
    pub(crate) fn step(
        &self,
        session: &mut Session<'_>,
        vars: &[(String, Var)],
        grads: &[Option<Tensor>],
    ) -> Result<StepReport, AdapterError> {
        let stream = self.device.cuda_stream();
        let tracks = stream.context().is_managing_stream_synchronization();
        let updated = || vars.iter().zip(grads).filter(|(_, grad)| grad.is_some());
        if tracks {
            for ((_, var), _) in updated() {
                announce(var, &stream).map_err(AdapterError::from_candle)?;
            }
        }
        let locked: Vec<_> = vars.iter().zip(grads).map(lock).collect();
        let mut places = Vec::with_capacity(locked.len());
        for ((name, _), locked) in vars.iter().zip(&locked) {
            places.push(match locked {
                Some(locked) => Some(locked.place(name, &stream)?),
                None => None,
            });
        }
        let handle = handle_of(&stream);
        let mut kept = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        kept.begin(&places);
        let tables = &mut kept.tables;
        let mut lender = BorrowedOnCuda { backend: &self.backend, places: &places, tables };
        // SAFETY: candle's stream, in the context of the backend.
        unsafe { self.backend.wait_for(handle) }?;
        let report = session.step_borrowed(&mut lender);
        if report.as_ref().is_ok_and(|report| report.skipped) {
            kept.tables.skipped();
        }
        // After a failed step, too: some of its work may be enqueued.
        // SAFETY: as above.
        let waits = unsafe { self.backend.make_wait(handle) };
        drop(places);
        drop(locked);
        if tracks {
            for ((_, var), _) in updated() {
                announce(var, &stream).map_err(AdapterError::from_candle)?;
            }
        }
        let report = report?;
        waits?;
        Ok(report)
    }
}

fn handle_of(stream: &CudaStream) -> StreamHandle {
    StreamHandle(stream.cu_stream().cast())
}

/// A variable and its gradient, locked for reading.
struct Locked<'a> {
    param: (candle_core::StorageRef<'a>, &'a Layout),
    grad: (candle_core::StorageRef<'a>, &'a Layout),
}

fn lock<'a>(((_, var), grad): (&'a (String, Var), &'a Option<Tensor>)) -> Option<Locked<'a>> {
    let grad = grad.as_ref()?;
    Some(Locked { param: var.storage_and_layout(), grad: grad.storage_and_layout() })
}

/// Addresses of a variable and its gradient, with cudarc's guards of both.
struct Place<'a> {
    param: DeviceTensor,
    grad: DeviceTensor,
    _guards: [SyncOnDrop<'a>; 2],
}

impl Locked<'_> {
    fn place<'a>(&'a self, name: &str, stream: &'a CudaStream) -> Result<Place<'a>, AdapterError> {
        let (param, param_guard) = place_of(&self.param.0, self.param.1, stream)
            .map_err(|error| AdapterError::Candle(format!("variable `{name}`: {error}")))?;
        let (grad, grad_guard) = place_of(&self.grad.0, self.grad.1, stream)
            .map_err(|error| AdapterError::Candle(format!("gradient of `{name}`: {error}")))?;
        Ok(Place { param, grad, _guards: [param_guard, grad_guard] })
    }
}

/// Address of a contiguous tensor's elements, with cudarc's guard.
fn place_of<'a>(
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> candle_core::Result<(DeviceTensor, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = storage else {
        candle_core::bail!("expected a tensor on a CUDA device, found one elsewhere")
    };
    let Some(range) = layout.contiguous_offsets() else {
        candle_core::bail!("expected a contiguous tensor, found strides")
    };
    match &storage.slice {
        CudaStorageSlice::F32(slice) => elements(slice, range, stream),
        CudaStorageSlice::F64(slice) => elements(slice, range, stream),
        CudaStorageSlice::F16(slice) => elements(slice, range, stream),
        CudaStorageSlice::BF16(slice) => elements(slice, range, stream),
        _ => candle_core::bail!("expected f32, f64, f16 or bf16, found another dtype"),
    }
}

fn elements<'a, T>(
    slice: &'a CudaSlice<T>,
    (start, end): (usize, usize),
    stream: &'a CudaStream,
) -> candle_core::Result<(DeviceTensor, SyncOnDrop<'a>)> {
    if start > end || end > slice.len() {
        candle_core::bail!("expected elements {start} to {end}, found {}", slice.len())
    }
    let (address, guard) = slice.device_ptr(stream);
    let first = address + (start * size_of::<T>()) as u64;
    // SAFETY: the elements lie in the slice, which its storage's lock keeps until what uses the
    // address is enqueued and candle's stream waits for it; candle frees memory in the order of
    // that stream. Variables are given once each and gradients lie in memory of their own
    // (`Variables::descriptors`, `Gradients::take`), so nothing that is written is read by another.
    let tensor = unsafe { DeviceTensor::at(first, (end - start) * size_of::<T>()) };
    Ok((tensor, guard))
}

/// Lender of variables and gradients by their position in the plan.
struct BorrowedOnCuda<'a, 'b> {
    backend: &'a CudaBackend,
    places: &'a [Option<Place<'b>>],
    tables: &'a mut BorrowedTables,
}

/// The tensor of a role of one parameter, as far as candle has it.
fn lend(places: &[Option<Place<'_>>], parameter: u32, role: Role) -> Option<DeviceTensor> {
    let place = places[parameter as usize].as_ref()?;
    match role {
        Role::Param => Some(place.param),
        Role::Grad => Some(place.grad),
        _ => None,
    }
}

impl Lender for BorrowedOnCuda<'_, '_> {
    fn backend(&self) -> &dyn Backend {
        self.backend
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| lend(self.places, parameter, role);
        self.backend.launch_borrowed(launch, &mut lend)
    }

    fn launch_derived(
        &mut self,
        launch: Launch<'_>,
        from: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| lend(self.places, parameter, role);
        self.tables.launch(self.backend, launch, from.rule, from.values, &mut lend)
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| lend(self.places, parameter, role);
        self.tables.reduce(self.backend, reduce, &mut lend)
    }
}

/// Makes candle's stream wait for other streams that use a variable, and later users of the
/// variable wait for candle's stream.
fn announce(var: &Var, stream: &CudaStream) -> candle_core::Result<()> {
    if var.elem_count() == 0 {
        return Ok(());
    }
    var.as_tensor().inplace_op1(&Announce(stream))
}

struct Announce<'a>(&'a CudaStream);

impl InplaceOp1 for Announce<'_> {
    fn name(&self) -> &'static str {
        "fused-step"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("{}: expected a CUDA device, found the cpu", self.name())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        match &mut storage.slice {
            CudaStorageSlice::F32(slice) => drop(slice.device_ptr_mut(self.0)),
            CudaStorageSlice::F64(slice) => drop(slice.device_ptr_mut(self.0)),
            CudaStorageSlice::F16(slice) => drop(slice.device_ptr_mut(self.0)),
            CudaStorageSlice::BF16(slice) => drop(slice.device_ptr_mut(self.0)),
            _ => {}
        }
        Ok(())
    }
}

/// Address at which a tensor's storage begins; `None` if it is empty or not floating point.
pub(crate) fn address(storage: &CudaStorage) -> Option<usize> {
    let stream = storage.device.cuda_stream();
    let at = |address: u64, len: usize| (len > 0).then_some(address as usize);
    match &storage.slice {
        CudaStorageSlice::F32(slice) => at(slice.device_ptr(&stream).0, slice.len()),
        CudaStorageSlice::F64(slice) => at(slice.device_ptr(&stream).0, slice.len()),
        CudaStorageSlice::F16(slice) => at(slice.device_ptr(&stream).0, slice.len()),
        CudaStorageSlice::BF16(slice) => at(slice.device_ptr(&stream).0, slice.len()),
        _ => None,
    }
}

/// Does `work` on a copy in host memory of a tensor's elements, and copies them back.
pub(crate) fn write_through_host(
    storage: &mut CudaStorage,
    layout: &Layout,
    work: &mut dyn FnMut(&mut [u8]) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let mut host = storage.to_cpu_storage()?;
    let width = storage.dtype().size_in_bytes();
    let place = layout.contiguous_offsets();
    let elements =
        place.and_then(|(start, end)| bytes_mut(&mut host)?.get_mut(start * width..end * width));
    let Some(elements) = elements else {
        candle_core::bail!("expected a contiguous tensor of floating point, found another")
    };
    work(elements)?;
    let device = storage.device.clone();
    match (&mut storage.slice, &host) {
        (CudaStorageSlice::F32(to), CpuStorage::F32(from)) => device.memcpy_htod(from, to),
        (CudaStorageSlice::F64(to), CpuStorage::F64(from)) => device.memcpy_htod(from, to),
        (CudaStorageSlice::F16(to), CpuStorage::F16(from)) => device.memcpy_htod(from, to),
        (CudaStorageSlice::BF16(to), CpuStorage::BF16(from)) => device.memcpy_htod(from, to),
        _ => candle_core::bail!("expected f32, f64, f16 or bf16, found another dtype"),
    }?;
    // The copy may read host memory that is freed when this call returns.
    device.synchronize()
}
