//! Values that the inside of a step takes and gives.

use fusestep::planner::{Optimizer, StepReport};
use pyo3::prelude::*;

/// Python functions that a step calls besides what it runs.
pub(super) struct Around<'a> {
    /// Function that shares sums with processes that have other parts of the tensors.
    pub(super) share: Option<&'a Py<PyAny>>,
    /// Function that gets updated parameters.
    pub(super) written: Option<&'a Py<PyAny>>,
}

/// The step that a framework has recorded: later ones are like it, since replays count with them.
pub(super) struct Recorded {
    pub(super) has_gradient: Vec<bool>,
    pub(super) rules: Vec<Optimizer>,
}

/// Work of a step that was enqueued.
pub(super) enum Ran {
    /// The step was taken, with this report if its outcome is known, and this error if Python's
    /// function for updated parameters raised one.
    Taken(Option<StepReport>, PyResult<()>),
    /// The step was recorded, and not taken.
    Recorded(PyResult<()>),
}
