//! Who is told that parameters have been written.

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::parameter::Parameter;

/// Parameters that a step writes, and who is to know.
pub(crate) struct Written {
    call: Py<PyAny>,
    lists: Vec<Py<PyList>>,
}

impl Written {
    /// For the parameters at the positions `updated` of `own`, which `parameters` lists.
    pub(crate) fn of(
        py: Python<'_>,
        call: Py<PyAny>,
        parameters: Vec<Bound<'_, PyList>>,
        (own, updated): (&[Parameter], &[usize]),
    ) -> PyResult<Self> {
        let lists = if updated.len() == own.len() {
            parameters.into_iter().map(Bound::unbind).collect()
        } else {
            let updated = updated.iter().map(|&at| &own[at].tensor);
            vec![PyList::new(py, updated)?.unbind()]
        };
        Ok(Self { call, lists })
    }

    /// Tells it, a list after the other.
    pub(crate) fn tell(&self, py: Python<'_>) -> PyResult<()> {
        let mut lists = self.lists.iter();
        lists.try_for_each(|list| self.call.call1(py, (list,)).map(drop))
    }
}
