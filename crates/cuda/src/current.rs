//! The context of the calling thread, which a framework in the same program has chosen.

use std::ptr;

use cust::sys::{self, CUcontext, CUresult};

/// The context that the calling thread had, which is the thread's again when this is dropped.
///
/// Calls of a backend leave their context current on their thread. A framework with several devices
/// takes the thread's context for its own choice of a device, so a program that steps on one device
/// after the other keeps this around each call.
#[derive(Debug)]
pub struct ContextBefore(Option<CUcontext>);

impl ContextBefore {
    /// Remembers the thread's context; nothing, where the driver has not started.
    pub fn remember() -> Self {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: writes one handle; a driver that has not started says so.
        let asked = unsafe { sys::cuCtxGetCurrent(&mut context) };
        Self((asked == CUresult::CUDA_SUCCESS).then_some(context))
    }
}

impl Drop for ContextBefore {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // SAFETY: the handle was the thread's when this was made, or is null and stands for
            // none. An error has no one to go to.
            let _ = unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}
