//! CUDA devices in a build without them: there is none, which the types say.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use fusestep::launch::{Backend, BackendError, Buffer, Launch, LaunchReport, MAX_SUMS, Reduce};
use fusestep::planner::{Brought, DerivedFrom};
use fusestep::tensor::DeviceSliceMut;
use fusestep::{Communicator, Error, SharedBackend};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::stream::{Asked, LendPlace, Stream};
use crate::tensor::Place;

/// A CUDA device; no value of it exists here.
#[derive(Clone)]
pub(crate) struct OnCuda(Infallible);

impl OnCuda {
    pub(crate) fn open(ordinal: u32, _: Stream) -> PyResult<Self> {
        Err(PyRuntimeError::new_err(format!(
            "cuda:{ordinal}: expected the extension module `fusestep._cuda`, found the one for the \
             CPU"
        )))
    }

    pub(crate) fn backend(&self) -> SharedBackend {
        match self.0 {}
    }

    pub(crate) fn as_backend(&self) -> &dyn Backend {
        match self.0 {}
    }

    pub(crate) fn ordered<T, E: From<BackendError>>(
        &self,
        _: Stream,
        _: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self.0 {}
    }

    pub(crate) fn waiting<T, E: From<BackendError>>(
        &self,
        _: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self.0 {}
    }

    pub(crate) fn recorded<T, E: From<BackendError>>(
        &self,
        _: Stream,
        _: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self.0 {}
    }

    pub(crate) fn join(
        &self,
        _: Box<dyn Communicator>,
        _: Duration,
        _: Option<PathBuf>,
    ) -> Result<Box<dyn Communicator>, Error> {
        match self.0 {}
    }

    pub(crate) fn copy(&self, _: Place, _: DeviceSliceMut<'_>) -> Result<(), BackendError> {
        match self.0 {}
    }

    pub(crate) fn launch(
        &self,
        _: LendPlace<'_>,
        _: &mut Tables,
        _: Launch<'_>,
        _: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        match self.0 {}
    }

    pub(crate) fn measure(
        &self,
        _: LendPlace<'_>,
        _: &Launch<'_>,
        _: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        match self.0 {}
    }

    pub(crate) fn bring_control(&self, _: usize) -> Result<Box<dyn Brought>, BackendError> {
        match self.0 {}
    }

    pub(crate) fn scale(
        &self,
        _: &mut Tables,
        _: Option<usize>,
        _: &mut dyn Buffer,
    ) -> Result<(), BackendError> {
        match self.0 {}
    }

    pub(crate) fn bring(&self, _: &dyn Buffer, _: usize) -> Result<Box<dyn Brought>, BackendError> {
        match self.0 {}
    }

    pub(crate) fn reduce(
        &self,
        _: LendPlace<'_>,
        _: &mut Tables,
        _: Reduce<'_>,
    ) -> Result<LaunchReport, BackendError> {
        match self.0 {}
    }
}

/// Tables of a device, which has none here.
#[derive(Debug, Default)]
pub(crate) struct Tables(());

impl Tables {
    pub(crate) fn begin(&mut self, _: u64, _: Asked, _: &[Option<usize>], _: bool) {}

    pub(crate) fn copied_bytes(&self) -> u64 {
        0
    }

    pub(crate) fn skipped(&mut self) {}

    pub(crate) fn steps_taken(&mut self) -> Result<u64, BackendError> {
        Ok(0)
    }
}

/// Context of the calling thread, of which there is none here.
pub(crate) struct ContextBefore;

impl ContextBefore {
    pub(crate) fn remember() -> Self {
        Self
    }
}
