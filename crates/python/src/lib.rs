#![doc = include_str!("../README.md")]

mod ahead;
mod collect;
mod engine;
mod getter;
mod gradient;
mod handle;
mod loan;
mod openmp;
mod parameter;
mod private;
mod rank;
mod ranks;
mod rules;
mod session;
mod setup;
mod tensor;
mod threads;
mod written;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Raises `ValueError` unless the settings name a rule and are all in range.
#[pyfunction]
fn check(settings: &Bound<'_, PyDict>) -> PyResult<()> {
    let settings = rules::Settings(settings);
    settings.trust().and(settings.rule()).map(drop)
}

/// The ways for processes to reach each other that this build has.
const ENGINES: &[&str] = if cfg!(feature = "mpi") { &["processes", "mpi"] } else { &["processes"] };

/// The extension module of the package `fusestep`.
#[pymodule]
fn _fusestep(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("engines", PyTuple::new(module.py(), ENGINES)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_class::<ranks::Ranks>()?;
    module.add_class::<session::Session>()
}
