//! What stands in for the backend in a build without the feature `cuda`.

use std::convert::Infallible;

use fusestep_launch::{
    Backend, BackendError, Buffer, Conclude, Launch, LaunchLimits, LaunchReport, Reduce,
};

use crate::{DeviceInfo, DeviceTime, NAME};

/// Runs kernels on a CUDA device; this build leaves it out, so that there is no value of this type.
#[derive(Debug)]
pub struct CudaBackend {
    never: Infallible,
}

impl CudaBackend {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`], always: the feature `cuda` is off.
    pub fn open(ordinal: u32) -> Result<Self, BackendError> {
        Err(BackendError::Unavailable {
            backend: NAME,
            reason: format!(
                "device {ordinal} cannot be opened: this build leaves CUDA out; build with the \
                 feature `cuda`, or use the cpu backend"
            ),
        })
    }

    /// This backend with other limits; they change the plan, not the bits.
    pub fn with_limits(self, _limits: LaunchLimits) -> Self {
        match self.never {}
    }

    /// Times steps by the device's clock.
    ///
    /// # Errors
    /// None: there is no value to call it on.
    pub fn timed<E: From<BackendError>>(
        &self,
        _steps: std::num::NonZeroU32,
        _step: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<DeviceTime, E> {
        match self.never {}
    }

    /// Copies between buffers of the device.
    ///
    /// # Errors
    /// None: there is no value to call it on.
    pub fn copy(
        &self,
        _from: &dyn Buffer,
        _to: &mut dyn Buffer,
        _len_bytes: usize,
    ) -> Result<(), BackendError> {
        match self.never {}
    }

    /// What the device and its driver offer.
    pub fn device_info(&self) -> &DeviceInfo {
        match self.never {}
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        match self.never {}
    }

    fn limits(&self) -> LaunchLimits {
        match self.never {}
    }

    fn allocate(&self, _len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        match self.never {}
    }

    fn write(
        &self,
        _buffer: &mut dyn Buffer,
        _offset_bytes: usize,
        _bytes: &[u8],
    ) -> Result<(), BackendError> {
        match self.never {}
    }

    fn read(
        &self,
        _buffer: &dyn Buffer,
        _offset_bytes: usize,
        _bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        match self.never {}
    }

    fn launch(&self, _launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        match self.never {}
    }

    fn reduce(&self, _reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        match self.never {}
    }

    fn conclude(&self, _conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        match self.never {}
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        match self.never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_cuda_says_what_would_work() {
        let error = CudaBackend::open(0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cuda: device 0 cannot be opened: this build leaves CUDA out; build with the feature \
             `cuda`, or use the cpu backend"
        );
    }
}
