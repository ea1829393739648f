//! Reports of steps, as Python has them.

use fusestep::Report;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A report by names; values that most steps lack are left out where they are.
pub(crate) fn named<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let named = PyDict::new(py);
    named.set_item(intern!(py, "step"), report.step)?;
    named.set_item(intern!(py, "lr"), report.lr)?;
    named.set_item(intern!(py, "launches"), report.launches)?;
    named.set_item(intern!(py, "elements"), report.elements)?;
    named.set_item(intern!(py, "without_gradient"), report.without_gradient)?;
    named.set_item(intern!(py, "copied_gradients"), report.copied_gradients)?;
    named.set_item(intern!(py, "grad_norm"), report.grad_norm)?;
    named.set_item(intern!(py, "update_norm"), report.update_norm)?;
    named.set_item(intern!(py, "non_finite"), report.non_finite)?;
    named.set_item(intern!(py, "skipped"), report.skipped)?;
    if report.loss.is_some() {
        named.set_item(intern!(py, "loss"), report.loss)?;
    }
    if report.loss_scale.is_some() {
        named.set_item(intern!(py, "loss_scale"), report.loss_scale)?;
    }
    if report.averaged {
        named.set_item(intern!(py, "averaged"), true)?;
    }
    for (name, count) in [
        (intern!(py, "tensors_skipped"), report.tensors_skipped),
        (intern!(py, "dropped_micro_steps"), report.dropped_micro_steps.into()),
        (intern!(py, "calls"), report.calls),
        (intern!(py, "bytes_sent"), report.bytes_sent),
    ] {
        if count > 0 {
            named.set_item(name, count)?;
        }
    }
    if let Some(seconds) = &report.seconds {
        let parts = PyDict::new(py);
        for (part, seconds) in seconds.parts() {
            parts.set_item(part, seconds)?;
        }
        named.set_item(intern!(py, "seconds"), parts)?;
    }
    Ok(named)
}
