//! Snapshots of the settings of parameter groups, which are compared so that they need not be read
//! again.
//!
//! Before each step the settings of every group are read, converted into a rule's settings and
//! checked, since anyone may have written to them. If a group still has the very same objects, and
//! these are of kinds that cannot change, the result would be the same.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyNone, PyString, PyTuple};

/// Settings of groups at one moment.
#[pyclass(module = "fusestep._fusestep", frozen)]
pub(crate) struct Snapshot {
    /// Names and values of each group; `None` if something in them can change in place.
    groups: Option<Vec<Vec<[Py<PyAny>; 2]>>>,
}

#[pymethods]
impl Snapshot {
    #[new]
    fn new(groups: Vec<Bound<'_, PyDict>>) -> Self {
        let own = |group: &Bound<'_, PyDict>| {
            let items = group.iter().filter(|(key, _)| is_setting(key));
            let items = items.map(|(key, value)| {
                (is_fixed(&key) && is_fixed(&value)).then(|| [key.unbind(), value.unbind()])
            });
            items.collect()
        };
        Self { groups: groups.iter().map(own).collect() }
    }

    /// Whether the groups still have these settings.
    fn holds(&self, groups: Vec<Bound<'_, PyDict>>) -> bool {
        self.groups.as_ref().is_some_and(|own| {
            own.len() == groups.len()
                && own.iter().zip(&groups).all(|(own, group)| {
                    let mut own = own.iter();
                    let mut items = group.iter().filter(|(key, _)| is_setting(key));
                    items.all(|(key, value)| {
                        let own = own.next();
                        own.is_some_and(|own| own[0].is(&key) && own[1].is(&value))
                    }) && own.next().is_none()
                })
        })
    }
}

/// Whether a key is neither that of the parameters nor that of their names.
fn is_setting(key: &Bound<'_, PyAny>) -> bool {
    let name = key.downcast_exact::<PyString>();
    !name.is_ok_and(|name| name == "params" || name == "param_names")
}

/// Whether an object is of a kind that cannot change.
fn is_fixed(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyNone>()
        || value.downcast_exact::<PyTuple>().is_ok_and(|tuple| {
            tuple.iter().all(|part| !part.is_instance_of::<PyTuple>() && is_fixed(&part))
        })
}
