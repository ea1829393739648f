#![doc = include_str!("../README.md")]

mod ahead;
mod codes;
mod collect;
mod cores;
#[cfg_attr(not(feature = "cuda"), path = "without_cuda.rs")]
mod cuda;
mod described;
mod device;
mod engine;
mod errors;
mod getter;
mod gradient;
mod group_rules;
mod handle;
mod listed;
mod lists;
mod loan;
mod openmp;
mod parameter;
mod pending;
mod private;
mod rank;
mod ranks;
mod reported;
mod rules;
mod sampled;
mod session;
mod settings;
mod setup;
mod sharing;
mod snapshot;
mod stream;
mod tensor;
mod threads;
mod waiting;
mod written;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Raises `ValueError` unless the settings name a rule and are all in range.
#[pyfunction]
fn check(settings: &Bound<'_, PyDict>) -> PyResult<()> {
    let settings = rules::Settings(settings);
    settings.trust().and(settings.rule()).map(drop)
}

/// The settings of every rule, with their defaults.
#[pyfunction]
#[pyo3(name = "rules")]
fn all_rules(python: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    rules::defaults(python)
}

/// Names of the tensors of state that a rule with these settings keeps beside a parameter.
#[pyfunction]
fn state_lists(settings: &Bound<'_, PyDict>) -> PyResult<Vec<&'static str>> {
    rules::state_lists(&rules::Settings(settings).rule()?)
}

/// The product of NAdam's momenta up to a step.
///
/// Raises `ValueError` in a build without NAdam.
#[pyfunction]
fn momentum_product(beta1: f64, momentum_decay: f64, step: u64) -> PyResult<f64> {
    #[cfg(feature = "nadam")]
    {
        let nadam = fusestep::nadam::NAdam { beta1, momentum_decay, ..Default::default() };
        Ok(nadam.momentum_product(step))
    }
    #[cfg(not(feature = "nadam"))]
    {
        let _ = (beta1, momentum_decay, step);
        Err(rules::unknown("nadam"))
    }
}

/// Hashes of sampled values of each tensor, which reveal writes that no version counts. `places`
/// are addresses and lengths in bytes.
#[pyfunction]
fn samples(places: Vec<(usize, usize)>) -> Vec<u64> {
    let of = |(address, len_bytes): (usize, usize)| {
        if len_bytes == 0 {
            return 0;
        }
        let start = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: the caller's tensor has so many bytes there, and is kept by it during the call;
        // the interpreter's lock is held.
        sampled::sample(unsafe { std::slice::from_raw_parts(start, len_bytes) })
    };
    places.into_iter().map(of).collect()
}

/// Engines of this build, by which processes reach each other.
const ENGINES: &[&str] = if cfg!(feature = "mpi") { &["processes", "mpi"] } else { &["processes"] };

/// The extension module of the package `fusestep`.
#[pymodule]
fn _fusestep(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("engines", PyTuple::new(module.py(), ENGINES)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_function(wrap_pyfunction!(momentum_product, module)?)?;
    module.add_function(wrap_pyfunction!(all_rules, module)?)?;
    module.add_function(wrap_pyfunction!(samples, module)?)?;
    module.add_function(wrap_pyfunction!(state_lists, module)?)?;
    module.add_function(wrap_pyfunction!(settings::settings, module)?)?;
    module.add_function(wrap_pyfunction!(settings::check_settings, module)?)?;
    module.add_class::<codes::Codes>()?;
    module.add_class::<lists::Lists>()?;
    module.add_class::<ranks::Ranks>()?;
    module.add_class::<snapshot::Snapshot>()?;
    module.add_class::<session::Session>()
}

/// The extension module `fusestep._cuda`, which has the driver's library: steps on CUDA devices.
#[cfg(feature = "cuda")]
#[pymodule]
fn _cuda(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<ranks::Ranks>()?;
    module.add_class::<session::Session>()
}
