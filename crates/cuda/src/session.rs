//! One device at work: its context, a stream, and what it offers.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::ptr;

use cust::context::Context;
use cust::device::Device;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUdevice_attribute, CUresult, CUstream};
use fusestep_launch::{ARGUMENT_BYTES_LARGE, BackendError};

use crate::handles::StreamHandle;
use crate::status::{check, describe, wrapped};
use crate::{DeviceInfo, NAME, Result};

/// The compute capability that the PTX is compiled for.
const LEAST_COMPUTE_CAPABILITY: (u32, u32) = (7, 0);

/// A device that is kept open by the backend and by each of its buffers.
#[derive(Debug)]
pub(crate) struct Session {
    // Declared before the context: the stream goes first.
    stream: WorkStream,
    context: Context,
    pub(crate) info: DeviceInfo,
}

/// The stream that work is enqueued on.
#[derive(Debug)]
pub(crate) enum WorkStream {
    /// Made here and destroyed with the session.
    Own(Stream),
    /// A framework's, which lives longer than the session.
    Adopted(StreamHandle),
}

impl Session {
    pub(crate) fn new(stream: WorkStream, context: Context, info: DeviceInfo) -> Self {
        Self { stream, context, info }
    }

    pub(crate) fn open(ordinal: u32) -> Result<Self, BackendError> {
        start()?;
        let info = read_info(ordinal)?;
        check_capability(&info)?;
        let context = primary_context(&info)?;
        let stream =
            wrapped(Stream::new(StreamFlags::DEFAULT, None), || "creating a stream".to_owned())?;
        Ok(Self::new(WorkStream::Own(stream), context, info))
    }

    /// Makes the context the calling thread's. Every use of the driver starts with it: threads have
    /// no context of their own.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until `self.context` is dropped.
        let status = unsafe { sys::cuCtxSetCurrent(self.context.as_raw()) };
        check(status, || "entering the context".to_owned())
    }

    /// The stream that work goes on: the session's own, or the one that [`Session::on`] has put in
    /// its place on this thread.
    pub(crate) fn stream(&self) -> CUstream {
        if let Some(instead) = INSTEAD.get()
            && instead.session == ptr::from_ref(self).addr()
        {
            return instead.stream;
        }
        match &self.stream {
            WorkStream::Own(stream) => stream.as_inner(),
            WorkStream::Adopted(stream) => stream.0.cast(),
        }
    }

    /// Does `work`, in which calls of this thread go on `stream` in place of the session's own.
    ///
    /// # Safety
    /// `stream` lives until `work` has returned, in the session's context.
    pub(crate) unsafe fn on<T>(&self, stream: CUstream, work: impl FnOnce() -> T) -> T {
        let instead = Instead { session: ptr::from_ref(self).addr(), stream };
        let _restored = Restored(INSTEAD.replace(Some(instead)));
        work()
    }

    /// A call of the driver in the context, with the stream, which lives as long as `self`;
    /// `operation` is what is being done.
    pub(crate) fn call(
        &self,
        operation: impl FnOnce() -> String,
        call: impl FnOnce(CUstream) -> CUresult,
    ) -> Result<()> {
        self.enter()?;
        check(call(self.stream()), operation)
    }

    /// Waits for everything enqueued.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let waiting = || "waiting for the device".to_owned();
        // SAFETY: the stream lives, and its context is current.
        self.call(waiting, |stream| unsafe { sys::cuStreamSynchronize(stream) })
    }
}

/// A stream in place of a session's own.
#[derive(Clone, Copy)]
struct Instead {
    /// Address of the session, which is borrowed meanwhile.
    session: usize,
    stream: CUstream,
}

thread_local! {
    static INSTEAD: Cell<Option<Instead>> = const { Cell::new(None) };
}

/// The state of [`INSTEAD`] before, which is put back when this is dropped.
struct Restored(Option<Instead>);

impl Drop for Restored {
    fn drop(&mut self) {
        INSTEAD.set(self.0);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The fields' own drops follow, on a thread that may not have had the context. An error
        // here has no one to go to.
        let _ = self.enter();
    }
}

pub(crate) fn unavailable(reason: String) -> BackendError {
    BackendError::Unavailable { backend: NAME, reason }
}

/// Starts the driver.
pub(crate) fn start() -> Result<()> {
    // SAFETY: no precondition; 0 is the only value for the flags.
    let status = unsafe { sys::cuInit(0) };
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(unavailable(format!(
        "the driver does not start, with code {}: {}; check the output of `nvidia-smi`, or use the \
         cpu backend",
        status as i32,
        describe(status)
    )))
}

/// The primary context of a device, current on the calling thread.
pub(crate) fn primary_context(info: &DeviceInfo) -> Result<Context, BackendError> {
    let opening = || format!("opening device {}", info.ordinal);
    let device = wrapped(Device::get_device(info.ordinal), opening)?;
    wrapped(Context::new(device), opening)
}

/// Refuses a device that does not run the PTX.
pub(crate) fn check_capability(info: &DeviceInfo) -> Result<()> {
    if info.compute_capability >= LEAST_COMPUTE_CAPABILITY {
        return Ok(());
    }
    let (major, minor) = info.compute_capability;
    Err(unavailable(format!(
        "device {} ({}): expected compute capability 7.0 or newer, found {major}.{minor}; use the \
         cpu backend",
        info.ordinal, info.name
    )))
}

pub(crate) fn read_info(ordinal: u32) -> Result<DeviceInfo, BackendError> {
    let reading = || format!("reading the properties of device {ordinal}");
    let mut version = 0;
    let mut count = 0;
    // SAFETY: both calls write one integer.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, reading)?;
    // SAFETY: as above; the driver is initialised.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, reading)?;
    let device = match i32::try_from(ordinal) {
        Ok(device) if device < count => device,
        _ => {
            return Err(unavailable(format!(
                "expected a device number below {count}, found {ordinal}"
            )));
        }
    };
    let mut handle = 0;
    // SAFETY: writes one handle; the ordinal was compared with the count.
    check(unsafe { sys::cuDeviceGet(&mut handle, device) }, reading)?;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: writes one integer; the handle comes from the driver.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, handle) };
        check(status, reading).map(|()| u32::try_from(value).unwrap_or(0))
    };
    let compute_capability = (
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let l2_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: the length is the array's; the last byte is left 0.
    let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, handle) };
    check(status, reading)?;
    // SAFETY: the array is 0 behind what the driver wrote.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let mut memory_bytes = 0;
    // SAFETY: writes one length; the handle comes from the driver.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, handle) };
    check(status, reading)?;
    let version = u32::try_from(version).unwrap_or(0);
    let driver_version = (version / 1000, version % 1000 / 10);
    Ok(DeviceInfo {
        ordinal,
        name: name.to_string_lossy().into_owned(),
        compute_capability,
        driver_version,
        memory_bytes: memory_bytes as u64,
        multiprocessors,
        l2_bytes: l2_bytes.into(),
        // Devices and drivers that take fewer do not read the PTX either.
        argument_bytes: ARGUMENT_BYTES_LARGE,
    })
}
