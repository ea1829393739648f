//! Sums over tensors of which other processes have parts, by the library's own calls.

use fusestep::launch::BackendError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyByteArrayMethods};

/// Python function that shares sums, and the error that it has raised.
pub(crate) struct Shares<'a> {
    /// Function that gets a byte array of f64, and how many of them each parameter has. It writes
    /// sums over whole parameters into the array.
    pub(crate) call: &'a Py<PyAny>,
    pub(crate) raised: Option<PyErr>,
}

impl Shares<'_> {
    /// Puts sums over whole parameters in place of those over this process's parts.
    pub(crate) fn share(&mut self, sums: &mut [f64], width: usize) -> Result<(), BackendError> {
        let done = Python::attach(|py| {
            let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
            let shared = PyByteArray::new(py, &bytes);
            self.call.call1(py, (&shared, width))?;
            let shared = shared.to_vec();
            if shared.len() != bytes.len() {
                let (expected, found) = (bytes.len(), shared.len());
                let text = format!("sums: expected {expected} bytes, found {found}");
                return Err(PyValueError::new_err(text));
            }
            let (shared, _) = shared.as_chunks();
            for (sum, &shared) in sums.iter_mut().zip(shared) {
                *sum = f64::from_ne_bytes(shared);
            }
            Ok(())
        });
        done.map_err(|error: PyErr| {
            let reason = format!("sums over processes: {error}");
            self.raised = Some(error);
            BackendError::Unavailable { backend: "torch.distributed", reason }
        })
    }
}
