//! CUDA driver as found at run time: the few functions for memory, streams, events and one kernel.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

use crate::NcclError;
use crate::library::{Stream, functions, open};

/// `CUDA_ERROR_NOT_READY`: an event that has not come yet.
const NOT_READY: c_int = 600;

/// `CUcontext`.
pub(crate) type Context = *mut c_void;
/// `CUevent`.
pub(crate) type Event = *mut c_void;
/// `CUmodule`.
pub(crate) type Module = *mut c_void;
/// `CUfunction`.
pub(crate) type Function = *mut c_void;
/// `CUdeviceptr`.
pub(crate) type Address = u64;

functions! {
    /// The functions of the driver.
    Driver {
        init = "cuInit": fn(c_uint) -> c_int;
        get_error_string = "cuGetErrorString": fn(c_int, *mut *const c_char) -> c_int;
        device_count = "cuDeviceGetCount": fn(*mut c_int) -> c_int;
        device_get = "cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
        device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
        device_uuid = "cuDeviceGetUuid": fn(*mut [u8; 16], c_int) -> c_int;
        device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
        context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Context, c_int) -> c_int;
        context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int) -> c_int;
        context_current = "cuCtxGetCurrent": fn(*mut Context) -> c_int;
        context_set = "cuCtxSetCurrent": fn(Context) -> c_int;
        allocate = "cuMemAlloc_v2": fn(*mut Address, usize) -> c_int;
        free = "cuMemFree_v2": fn(Address) -> c_int;
        upload = "cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, Stream) -> c_int;
        download = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, Address, usize, Stream) -> c_int;
        copy = "cuMemcpyDtoDAsync_v2": fn(Address, Address, usize, Stream) -> c_int;
        module_load = "cuModuleLoadData": fn(*mut Module, *const c_void) -> c_int;
        module_unload = "cuModuleUnload": fn(Module) -> c_int;
        module_function = "cuModuleGetFunction": fn(*mut Function, Module, *const c_char) -> c_int;
        launch = "cuLaunchKernel": fn(
            Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream,
            *mut *mut c_void, *mut *mut c_void
        ) -> c_int;
        stream_create = "cuStreamCreate": fn(*mut Stream, c_uint) -> c_int;
        stream_destroy = "cuStreamDestroy_v2": fn(Stream) -> c_int;
        stream_synchronize = "cuStreamSynchronize": fn(Stream) -> c_int;
        stream_wait_event = "cuStreamWaitEvent": fn(Stream, Event, c_uint) -> c_int;
        event_create = "cuEventCreate": fn(*mut Event, c_uint) -> c_int;
        event_record = "cuEventRecord": fn(Event, Stream) -> c_int;
        event_query = "cuEventQuery": fn(Event) -> c_int;
        event_destroy = "cuEventDestroy_v2": fn(Event) -> c_int;
    }
}

impl Driver {
    /// Loads the driver and starts it.
    pub(crate) fn load(path: &Path) -> Result<Self, NcclError> {
        let library =
            open(path, "install NVIDIA's driver, or use ranks that are threads or MPI processes")?;
        let driver = Self::find(ManuallyDrop::into_inner(library), path)?;
        // SAFETY: any number of calls, from any thread.
        let started = unsafe { (driver.init)(0) };
        driver.check(started).map_err(NcclError::of_call("cuInit"))?;
        Ok(driver)
    }

    /// Turns a result code into an error with the driver's words.
    pub(crate) fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: it writes a pointer to a static text, or leaves null for a code that it does not
        // know.
        let name = unsafe {
            (self.get_error_string)(code, &mut text);
            if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        Err(format!("CUDA error {code}, {name}"))
    }

    /// Whether an event has come, from the result code of its query.
    pub(crate) fn has_come(&self, code: c_int) -> Result<bool, String> {
        match code {
            NOT_READY => Ok(false),
            code => self.check(code).map(|()| true),
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
