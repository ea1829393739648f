#![doc = include_str!("../README.md")]

mod collect;
mod dlpack;
mod loan;
mod rules;
mod session;
mod threads;

use pyo3::prelude::*;

/// The extension module of the package `fusestep`.
#[pymodule]
fn _fusestep(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<session::Session>()
}
