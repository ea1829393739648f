//! Places in streams.

use std::ptr;
use std::sync::Arc;

use cust::sys::{self, CUevent, CUevent_flags, CUstream};
use fusestep_launch::BackendError;

use crate::Result;
use crate::session::Session;

/// A place in a stream, once it is recorded there.
#[derive(Debug)]
pub(crate) struct Event {
    event: CUevent,
    session: Arc<Session>,
}

/// The purpose of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventUse {
    /// Time: the time between two events is asked for.
    Time,
    /// Order: other work follows the event.
    Order,
}

impl Event {
    pub(crate) fn new(session: &Arc<Session>, of: EventUse) -> Result<Self, BackendError> {
        let flags = match of {
            EventUse::Time => CUevent_flags::CU_EVENT_DEFAULT,
            EventUse::Order => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let mut event: CUevent = ptr::null_mut();
        let creating = || "creating an event".to_owned();
        // SAFETY: writes one handle; the context is current.
        session.call(creating, |_| unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(Self { event, session: Arc::clone(session) })
    }

    /// Records the event behind the work that is on `stream` by now.
    ///
    /// # Safety
    /// `stream` lives, in the session's context.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<()> {
        let recording = || "recording an event".to_owned();
        // SAFETY: the event lives as long as `self`, the stream is the caller's.
        self.session.call(recording, |_| unsafe { sys::cuEventRecord(self.event, stream) })
    }

    /// Lets work that is enqueued on `stream` from now on wait for the event.
    ///
    /// # Safety
    /// As [`Event::record`].
    pub(crate) unsafe fn hold(&self, stream: CUstream) -> Result<()> {
        let holding = || "letting a stream wait for an event".to_owned();
        // SAFETY: as above; the driver keeps what a stream waits for beyond the event.
        self.session.call(holding, |_| unsafe { sys::cuStreamWaitEvent(stream, self.event, 0) })
    }

    /// Waits until the event has been reached.
    pub(crate) fn wait(&self) -> Result<()> {
        let waiting = || "waiting for an event".to_owned();
        // SAFETY: the event lives as long as `self`.
        self.session.call(waiting, |_| unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// The driver's handle of the event.
    pub(crate) fn handle(&self) -> u64 {
        self.event as u64
    }

    /// Milliseconds from `start` to this one, both of which have been reached.
    pub(crate) fn since(&self, start: &Self) -> Result<f32, BackendError> {
        let reading = || "reading the time between events".to_owned();
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; both events live.
        self.session.call(reading, |_| unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, start.event, self.event)
        })?;
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
