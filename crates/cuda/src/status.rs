//! The driver's status codes as errors.

use std::ffi::{CStr, c_char};
use std::ptr;

use cust::error::CudaError;
use cust::sys::{self, CUresult};
use fusestep_launch::BackendError;

use crate::{NAME, Result};

/// An error with the driver's own code, name and text, unless the call succeeded. `operation` is
/// what was being done.
pub(crate) fn check(status: CUresult, operation: impl FnOnce() -> String) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(BackendError::Device {
        backend: NAME,
        operation: operation(),
        code: i64::from(status as i32),
        text: describe(status),
    })
}

/// The result of a call of the driver through the wrappers of `cust`; `operation` names the call in
/// an error.
pub(crate) fn wrapped<T>(
    result: Result<T, CudaError>,
    operation: impl FnOnce() -> String,
) -> Result<T, BackendError> {
    result.map_err(|error| BackendError::Device {
        backend: NAME,
        operation: operation(),
        code: i64::from(error as u32),
        text: error.to_string(),
    })
}

/// The driver's name and text of a status.
pub(crate) fn describe(status: CUresult) -> String {
    type Lookup = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;
    let look_up = |function: Lookup| {
        let mut text = ptr::null();
        // SAFETY: both functions of this type write a pointer to a string that lives as long as the
        // driver, or return an error.
        let found = unsafe { function(status, &mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: the call succeeded, so `text` points to such a string.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    match (look_up(sys::cuGetErrorName), look_up(sys::cuGetErrorString)) {
        (Some(name), Some(text)) => format!("{name}, {text}"),
        (Some(text), None) | (None, Some(text)) => text,
        (None, None) => "the driver has no text for it".to_owned(),
    }
}
