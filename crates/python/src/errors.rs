//! Errors of PyTorch's kinds.

use std::fmt::Display;

use fusestep::SessionError;
use fusestep::planner::PlanError;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

/// A refusal, before anything has changed.
pub(crate) fn refused(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A failure of work that had begun.
pub(crate) fn failed(error: impl Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// An error of a session that could not be made: memory that cannot be had, or settings.
pub(crate) fn started(error: SessionError) -> PyErr {
    match error {
        SessionError::Plan(PlanError::Backend(error)) => failed(error),
        error => refused(error),
    }
}
