//! Waits for a rank's thread, which a Ctrl-C ends.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Length of a wait before signals are checked.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Waits for an answer. A signal whose handler raises ends the wait, after a call of `broken`.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    mut answer: Receiver<T>,
    broken: impl FnOnce(&PyErr),
) -> PyResult<T> {
    loop {
        let (back, came) = py.detach(move || {
            let came = answer.recv_timeout(PAUSE);
            (answer, came)
        });
        match came {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(gone()),
            Err(RecvTimeoutError::Timeout) => answer = back,
        }
        if let Err(raised) = py.check_signals() {
            broken(&raised);
            return Err(raised);
        }
    }
}

/// The error of a thread that has ended without an answer.
pub(crate) fn gone() -> PyErr {
    PyRuntimeError::new_err("expected the rank's thread to answer, found it gone")
}
