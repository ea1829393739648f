//! Places in streams.

use std::ptr;
use std::sync::Arc;

use cust::sys::{self, CUevent, CUevent_flags, CUstream};
use fusestep_launch::BackendError;

use crate::session::Session;
use crate::status::check;

/// A place in a stream, once it is recorded there.
#[derive(Debug)]
pub(crate) struct Event {
    event: CUevent,
    session: Arc<Session>,
}

/// What an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventUse {
    /// The time between two of them.
    Time,
    /// That other work follows.
    Order,
}

impl Event {
    pub(crate) fn new(session: &Arc<Session>, of: EventUse) -> Result<Self, BackendError> {
        session.enter()?;
        let flags = match of {
            EventUse::Time => CUevent_flags::CU_EVENT_DEFAULT,
            EventUse::Order => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        let status = unsafe { sys::cuEventCreate(&mut event, flags as u32) };
        check(status, || "creating an event".to_owned())?;
        Ok(Self { event, session: Arc::clone(session) })
    }

    /// Records it behind what is on `stream` by now.
    ///
    /// # Safety
    /// `stream` lives, in the session's context.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<(), BackendError> {
        self.session.enter()?;
        // SAFETY: the event lives as long as `self`, the stream is the caller's.
        let status = unsafe { sys::cuEventRecord(self.event, stream) };
        check(status, || "recording an event".to_owned())
    }

    /// Lets what is enqueued on `stream` from now on begin behind it.
    ///
    /// # Safety
    /// As [`Event::record`].
    pub(crate) unsafe fn hold(&self, stream: CUstream) -> Result<(), BackendError> {
        self.session.enter()?;
        // SAFETY: as above; the driver keeps what a stream waits for beyond the event.
        let status = unsafe { sys::cuStreamWaitEvent(stream, self.event, 0) };
        check(status, || "letting a stream wait for an event".to_owned())
    }

    /// The driver's name for it.
    pub(crate) fn handle(&self) -> u64 {
        self.event as u64
    }

    /// Milliseconds from `start` to this one, both of which have been reached.
    pub(crate) fn since(&self, start: &Self) -> Result<f32, BackendError> {
        self.session.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; both events live.
        let status = unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.event, self.event) };
        check(status, || "reading the time between events".to_owned())?;
        Ok(milliseconds)
    }
}

// SAFETY: an event is a name that the driver takes on any thread; what is done with it here is
// done by calls of the driver, one after the other.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if self.session.enter().is_ok() {
            // SAFETY: the handle was created in `new` and is destroyed once; the driver waits with
            // that for what the event stands for. An error has no one to go to here.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
