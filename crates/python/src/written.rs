//! Report of the parameters that a step has written.

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::gradient::Direct;
use crate::parameter::Parameter;

/// Parameters that a step writes, and the ways to report them.
pub(crate) struct Written<'a> {
    /// Python function that gets a list of the parameters whose versions are not counted directly.
    pub(crate) call: &'a Py<PyAny>,
    pub(crate) direct: Option<&'a Direct>,
    pub(crate) parameters: &'a [Parameter],
    /// Positions of the written parameters.
    pub(crate) updated: &'a [usize],
}

impl Written<'_> {
    /// Counts a version of each written parameter, or reports it.
    pub(crate) fn tell(&self, py: Python<'_>) -> PyResult<()> {
        let mut others = Vec::new();
        for &at in self.updated {
            let Parameter { tensor, known, .. } = &self.parameters[at];
            let is_counted = self.direct.zip(*known).is_some_and(|(direct, known)| {
                // SAFETY: `known` is the answer of `Direct::countable` for this object, from when
                // the step was planned.
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
