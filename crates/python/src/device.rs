//! Devices that a library keeps tensors on, and the backends that step there.

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use fusestep::launch::{Backend, BackendError};
use fusestep::{CpuBackend, SharedBackend};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::cuda::{ContextBefore, OnCuda};
use crate::stream::Stream;
use crate::threads;

/// Device of all tensors of a plan.
#[derive(Clone)]
pub(crate) enum Device {
    /// Host memory.
    Host,
    /// A CUDA device.
    Cuda(OnCuda),
}

impl Device {
    /// The device that a library's attribute `device` numbers; host memory without one.
    ///
    /// # Errors
    /// `RuntimeError` for a device that cannot be opened.
    pub(crate) fn of(library: &Bound<'_, PyAny>) -> PyResult<Self> {
        match library.getattr_opt(intern!(library.py(), "device"))? {
            None => Ok(Self::Host),
            Some(number) if number.is_none() => Ok(Self::Host),
            Some(number) => OnCuda::open(number.extract()?, stream_of(library)?).map(Self::Cuda),
        }
    }

    /// The name of the device in messages.
    pub(crate) fn name_of(&self, library: &Bound<'_, PyAny>) -> PyResult<String> {
        match self {
            Self::Host => Ok("the CPU".to_owned()),
            Self::Cuda(_) => Ok(library.str()?.to_string()),
        }
    }

    /// The backend that makes a plan's memory.
    pub(crate) fn backend(&self) -> PyResult<SharedBackend> {
        match self {
            Self::Host => Ok(threads::backend(NonZeroUsize::MIN)?),
            Self::Cuda(on) => Ok(on.backend()),
        }
    }

    /// Does `work`, which may wait for the device, even while another stream is recorded.
    pub(crate) fn waiting<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            Self::Host => work(),
            Self::Cuda(on) => on.waiting(work),
        }
    }

    /// The order of one call's work with the library's, for a call on another thread.
    ///
    /// # Errors
    /// `RuntimeError` while the library records a graph.
    pub(crate) fn order(&self, library: Option<&Bound<'_, PyAny>>) -> PyResult<Order> {
        let (Self::Cuda(on), Some(library)) = (self, library) else {
            return Ok(Order::Host);
        };
        let stream = stream_of(library)?;
        if stream.records {
            return Err(PyRuntimeError::new_err(format!(
                "{library}: expected calls of ranks outside of a recording, because they wait for \
                 the other ranks, found a graph under way; record the forward and the backward \
                 pass alone, or step in one process"
            )));
        }
        Ok(Order::Behind(on.clone(), stream))
    }

    /// The backend of one step: on so many threads, or behind the work of the library's stream.
    pub(crate) fn place(
        &self,
        threads: usize,
        library: &Bound<'_, PyAny>,
    ) -> PyResult<StepPlace<'_>> {
        match self {
            Self::Host => {
                let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
                Ok(StepPlace::Host(threads::backend(threads)?))
            }
            Self::Cuda(on) => Ok(StepPlace::Cuda(on, stream_of(library)?)),
        }
    }
}

/// The stream that the library works on now.
fn stream_of(library: &Bound<'_, PyAny>) -> PyResult<Stream> {
    library.call_method0(intern!(library.py(), "stream"))?.extract()
}

/// Order of a call's work with that of the library.
pub(crate) enum Order {
    /// Nothing is enqueued.
    Host,
    /// Behind what the library has enqueued on a stream, and before what it enqueues next.
    Behind(OnCuda, Stream),
}

impl Order {
    /// Does `work` in this order. The host waits for neither.
    pub(crate) fn ordered<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            Self::Host => work(),
            Self::Behind(on, stream) => on.ordered(*stream, work),
        }
    }
}

/// Backend of one step, and what the step waits for.
pub(crate) enum StepPlace<'a> {
    Host(Arc<CpuBackend>),
    Cuda(&'a OnCuda, Stream),
}

impl StepPlace<'_> {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Host(backend) => backend.as_ref(),
            Self::Cuda(on, _) => on.as_backend(),
        }
    }

    /// Whether work is enqueued there, and done later.
    pub(crate) fn is_device(&self) -> bool {
        matches!(self, Self::Cuda(..))
    }

    /// Whether the library records what is enqueued there as a graph.
    pub(crate) fn records(&self) -> bool {
        matches!(self, Self::Cuda(_, stream) if stream.records)
    }

    /// Does `work`, whose launches the library records.
    pub(crate) fn recorded<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            Self::Host(_) => work(),
            Self::Cuda(on, stream) => on.recorded(*stream, work),
        }
    }

    /// Does `work` behind what the library has enqueued, and before what it enqueues next. The host
    /// waits for neither.
    pub(crate) fn ordered<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self {
            Self::Host(_) => work(),
            Self::Cuda(on, stream) => on.ordered(*stream, work),
        }
    }
}

/// A value with memory of a device, which is freed without a change of the thread's context.
pub(crate) struct InContext<T>(ManuallyDrop<T>);

impl<T> InContext<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Deref for InContext<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for InContext<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for InContext<T> {
    fn drop(&mut self) {
        let _before = ContextBefore::remember();
        // SAFETY: dropped once, here, and nobody reaches it afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
