//! Checks that calls of Python's have in common, and tasks for the rank's thread.

use std::sync::mpsc::channel;
use std::sync::{MutexGuard, PoisonError};

use fusestep::planner::{Optimizer, PlanError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{Link, Ranks};
use crate::device::Order;
use crate::errors::failed;
use crate::rank::{Rank, Stepped, Task};
use crate::reported::named;
use crate::waiting::{gone, wait};

impl Ranks {
    pub(super) fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check(&self, index: usize) -> PyResult<()> {
        if index < self.names.len() {
            return Ok(());
        }
        let expected = self.names.len();
        Err(PyValueError::new_err(format!("index: expected one below {expected}, found {index}")))
    }

    /// Refuses another number of bytes than the parameter has.
    pub(super) fn check_bytes(&self, index: usize, found: usize) -> PyResult<()> {
        self.check(index)?;
        let expected = self.places[index].len_bytes;
        if found == expected {
            return Ok(());
        }
        let name = &self.names[index];
        Err(PyValueError::new_err(format!(
            "parameter `{name}`: expected {expected} bytes, found {found}"
        )))
    }

    pub(super) fn send(&self, task: Task) -> PyResult<()> {
        let link = self.link();
        let Some(tasks) = &link.tasks else {
            return Err(PyRuntimeError::new_err(format!(
                "expected ranks that are joined, found a communicator that is closed: {}",
                link.closed
            )));
        };
        tasks.send(task).map_err(|_| gone())
    }

    /// Runs `work` on the rank's thread and waits for it, without the interpreter's lock. A signal
    /// whose handler raises aborts the group on all ranks.
    pub(super) fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Rank<'_>) -> Result<T, PlanError> + Send + 'static,
    ) -> PyResult<T> {
        let (send, receive) = channel();
        let order = self.order(py)?;
        self.send(Box::new(move |rank| {
            let _ = send.send(rank.attempt(|rank| order.ordered(|| work(rank))));
        }))?;
        let done = wait(py, receive, |_| {
            self.aborter.abort("interrupted");
            let mut link = self.link();
            (link.tasks, link.closed) = (None, "a call was interrupted");
        });
        done?.map_err(failed)
    }

    /// Runs `work` on the rank's thread and waits for it, whatever signals come meanwhile.
    pub(super) fn until_done(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Rank<'_>) -> Result<(), PlanError> + Send + 'static,
    ) -> PyResult<()> {
        let (send, receive) = channel();
        self.send(Box::new(move |rank| {
            let _ = send.send(rank.attempt(work));
        }))?;
        let done = py.detach(move || receive.recv());
        done.map_err(|_| gone())?.map_err(failed)
    }

    /// The order of a call's work with the library's.
    pub(super) fn order(&self, py: Python<'_>) -> PyResult<Order> {
        self.device.order(self.library.as_ref().map(|library| library.bind(py)))
    }

    /// The rules with their numbers in the plan.
    pub(super) fn numbered(&self, rules: Vec<Optimizer>) -> PyResult<Vec<(usize, Optimizer)>> {
        if rules.len() != self.rule_numbers.len() {
            return Err(PyValueError::new_err(format!(
                "expected {} parameter groups as at the start, found {}",
                self.rule_numbers.len(),
                rules.len()
            )));
        }
        let numbers = self.rule_numbers.iter().copied();
        let mut numbered: Vec<(usize, Optimizer)> = Vec::new();
        for (number, rule) in numbers.zip(rules) {
            let Some(number) = number else { continue };
            match numbered.iter().find(|(known, _)| *known == number) {
                None => numbered.push((number, rule)),
                Some((_, known)) if *known == rule => {}
                Some(_) => {
                    return Err(PyValueError::new_err(
                        "expected parameter groups that began alike to stay alike, found other \
                         settings; give them different ones from the start",
                    ));
                }
            }
        }
        Ok(numbered)
    }

    pub(super) fn told<'py>(
        &self,
        py: Python<'py>,
        stepped: Stepped,
    ) -> PyResult<Bound<'py, PyDict>> {
        let told = PyDict::new(py);
        told.set_item("loss_scale", stepped.loss_scale)?;
        let norms = stepped.update_norms;
        let norms = norms.map(|norms| self.names.iter().cloned().zip(norms).collect::<Vec<_>>());
        told.set_item("update_norms", norms)?;
        told.set_item("averaged", stepped.averaged)?;
        let report = stepped.told.map(|report| named(py, &report));
        told.set_item("report", report.transpose()?)?;
        Ok(told)
    }
}
