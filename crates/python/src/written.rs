//! Who is told that parameters have been written.

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::gradient::Direct;
use crate::parameter::Parameter;

/// Parameters that a step writes, and who is to know.
pub(crate) struct Written<'a> {
    /// Called with a list of those that are not counted directly.
    pub(crate) call: &'a Py<PyAny>,
    pub(crate) direct: Option<&'a Direct>,
    pub(crate) parameters: &'a [Parameter],
    /// Positions of those that are written.
    pub(crate) updated: &'a [usize],
}

impl Written<'_> {
    /// Counts a version of each of them.
    pub(crate) fn tell(&self, py: Python<'_>) -> PyResult<()> {
        let mut others = Vec::new();
        for &at in self.updated {
            let Parameter { tensor, known, .. } = &self.parameters[at];
            let is_counted = self.direct.zip(*known).is_some_and(|(direct, known)| {
                // SAFETY: what was said of this object when it was planned for.
                unsafe { direct.count(tensor.bind(py), known) }
            });
            if !is_counted {
                others.push(tensor);
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        self.call.call1(py, (PyList::new(py, others)?,)).map(drop)
    }
}
