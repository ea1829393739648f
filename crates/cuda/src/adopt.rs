//! A backend in a context and on a stream that a framework made: work goes where its own goes.

use std::ptr;

use cust::context::Context;
use cust::device::Device;
use cust::sys::{self, CUcontext, CUstream};
use fusestep_launch::BackendError;

use crate::backend::CudaBackend;
use crate::event::{Event, EventUse};
use crate::handles::{ContextHandle, StreamHandle};
use crate::recording;
use crate::session::{
    Session, WorkStream, check_capability, primary_context, read_info, start, unavailable,
};
use crate::status::{check, wrapped};

impl CudaBackend {
    /// Works in a framework's context and on its stream. So launches follow the work that the
    /// framework has enqueued there, such as a backward pass, and precede its next. The host waits
    /// for neither.
    ///
    /// The context is the primary one of its device, as PyTorch, cudarc and candle use it. It is
    /// retained: it outlives the framework's own hold on it, and is neither reset nor destroyed.
    /// The stream stays the framework's. Like `cudaSetDevice`, calls leave the context current on
    /// their thread. A legacy default stream cannot record graphs.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if the context is null or not its device's primary one, if the
    /// device is too old, or if the stream belongs to another context. Likewise for
    /// [`StreamHandle::PER_THREAD`], which names another stream on every thread: then
    /// [`CudaBackend::open`] the device, which has the same context, and order the streams by
    /// [`CudaBackend::wait_for`] and [`CudaBackend::make_wait`]. [`BackendError::Device`] with the
    /// driver's code if it refuses a handle. After an error the thread's context is as before.
    /// # Safety
    /// `context` and `stream` are handles of the driver that this program is linked with. The
    /// stream lives until the backend and everything made with it are dropped: buffers, tables and
    /// graphs.
    pub unsafe fn adopt(
        context: ContextHandle,
        stream: StreamHandle,
    ) -> Result<Self, BackendError> {
        start()?;
        if context.0.is_null() {
            return Err(unavailable(
                "expected the context that a framework works in, found a null handle".to_owned(),
            ));
        }
        let mut before: CUcontext = ptr::null_mut();
        // SAFETY: writes one handle; the driver has started.
        let asked = unsafe { sys::cuCtxGetCurrent(&mut before) };
        check(asked, || "asking for the thread's context".to_owned())?;
        // SAFETY: the caller's.
        match unsafe { adopt(context, stream) } {
            Ok(session) => Ok(Self::of(session)),
            Err(error) => {
                // SAFETY: the handle was the thread's when this call began. That error matters less
                // than the one to be returned.
                let _ = unsafe { sys::cuCtxSetCurrent(before) };
                Err(error)
            }
        }
    }

    /// [`CudaBackend::adopt`] in the primary context of device `ordinal`, for a program that has
    /// the framework's stream and not its context.
    ///
    /// # Errors
    /// As [`CudaBackend::adopt`]; as [`CudaBackend::open`].
    /// # Safety
    /// As [`CudaBackend::adopt`].
    pub unsafe fn adopt_on(ordinal: u32, stream: StreamHandle) -> Result<Self, BackendError> {
        start()?;
        // A device has one of it, which is retained here until the adoption has retained it, too.
        let primary = primary_context(&read_info(ordinal)?)?;
        // SAFETY: a context of this driver, and the caller's stream.
        unsafe { Self::adopt(ContextHandle(primary.as_raw().cast()), stream) }
    }

    /// Lets work that is enqueued here from now on wait for the work that is on `stream` by now.
    /// The host does not wait.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the driver's code.
    /// # Safety
    /// `stream` is a stream of this backend's context, or a default stream.
    pub unsafe fn wait_for(&self, stream: StreamHandle) -> Result<(), BackendError> {
        // SAFETY: the caller's; the session's own stream lives as long as it.
        unsafe { self.order(stream.0.cast(), self.session.stream()) }
    }

    /// Lets work that is enqueued on `stream` from now on wait for the work that is enqueued here
    /// by now. The host does not wait.
    ///
    /// # Errors
    /// As [`CudaBackend::wait_for`].
    /// # Safety
    /// As [`CudaBackend::wait_for`].
    pub unsafe fn make_wait(&self, stream: StreamHandle) -> Result<(), BackendError> {
        // SAFETY: as above.
        unsafe { self.order(self.session.stream(), stream.0.cast()) }
    }

    /// Does `work`, which may wait for the device even while a framework records: the driver else
    /// spoils recordings beside which this thread waits.
    ///
    /// # Errors
    /// As [`CudaBackend::recorded_on`].
    pub fn beside_recordings<T, E: From<BackendError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        recording::beside(self, work)
    }

    /// Does `work`, whose launches from this thread go on `stream`, which a framework records.
    ///
    /// # Errors
    /// Those of `work`; [`BackendError::Device`] with the driver's code.
    /// # Safety
    /// `stream` is a stream of this backend's context that lives until `work` has returned. What
    /// was enqueued on the backend's own stream before is done before the graph runs.
    pub unsafe fn recorded_on<T, E: From<BackendError>>(
        &self,
        stream: StreamHandle,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        // SAFETY: the caller's.
        unsafe { recording::recorded_on(self, stream, work) }
    }

    /// # Safety
    /// Both streams live, in this backend's context.
    unsafe fn order(&self, first: CUstream, then: CUstream) -> Result<(), BackendError> {
        if first == then {
            return Ok(());
        }
        let event = Event::new(&self.session, EventUse::Order)?;
        // SAFETY: the caller's.
        unsafe { event.record(first) }?;
        // SAFETY: the caller's.
        unsafe { event.hold(then) }
    }
}

/// # Safety
/// The promises are those of [`CudaBackend::adopt`].
unsafe fn adopt(context: ContextHandle, stream: StreamHandle) -> Result<Session, BackendError> {
    let raw: CUcontext = context.0.cast();
    let entering = || "entering the context to be adopted".to_owned();
    // SAFETY: the caller's: a context of this driver.
    check(unsafe { sys::cuCtxSetCurrent(raw) }, entering)?;
    let mut handle = 0;
    // SAFETY: writes one handle; a context is current.
    check(unsafe { sys::cuCtxGetDevice(&mut handle) }, entering)?;
    let device = device_of(handle)?;
    let info = read_info(device.0)?;
    check_capability(&info)?;
    // Retains it, and releases it when dropped.
    let primary = wrapped(Context::new(device.1), entering)?;
    if primary.as_raw() != raw {
        return Err(unavailable(format!(
            "expected the primary context of device {} ({}), which PyTorch, cudarc and candle \
             use, found another context of it",
            info.ordinal, info.name
        )));
    }
    if stream == StreamHandle::PER_THREAD {
        return Err(unavailable(
            "expected a stream that is the same on every thread, found the per-thread default \
             stream; open the device and order the streams by `wait_for` and `make_wait`"
                .to_owned(),
        ));
    }
    if !stream.is_legacy() {
        let mut found: CUcontext = ptr::null_mut();
        // SAFETY: the caller's: a stream of this driver; the call writes one handle.
        let asked = unsafe { sys::cuStreamGetCtx(stream.0.cast(), &mut found) };
        check(asked, || "asking for the context of the stream to be adopted".to_owned())?;
        if found != raw {
            return Err(unavailable(
                "expected a stream of the context to be adopted, found one of another context"
                    .to_owned(),
            ));
        }
    }
    Ok(Session::new(WorkStream::Adopted(stream), primary, info))
}

/// The number and the wrapper of a device.
fn device_of(handle: sys::CUdevice) -> Result<(u32, Device), BackendError> {
    let looking = || "looking for the device of the context".to_owned();
    let count = wrapped(Device::num_devices(), looking)?;
    for ordinal in 0..count {
        let device = wrapped(Device::get_device(ordinal), looking)?;
        if device.as_raw() == handle {
            return Ok((ordinal, device));
        }
    }
    Err(unavailable(format!(
        "expected the context of one of {count} devices, found handle {handle}"
    )))
}
