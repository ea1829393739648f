//! A parameter of a step, and its state in the optimizer.

use std::sync::Arc;

use fusestep::launch::{MAX_LISTS, TensorList};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use pyo3::{ffi, intern};

use crate::ahead::TENSORS;
use crate::gradient::Known;
use crate::loan::{Member, Overlap};
use crate::tensor::is_dense;

/// Position of the tensor that counts a parameter's steps, behind the tensors of its lists.
pub(crate) const COUNT: usize = MAX_LISTS;

/// A parameter and the plan's facts about it. It is small, since a step reads thousands of them.
pub(crate) struct Parameter {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) shape: Arc<[u64]>,
    /// Shape of the units of its state, where that is kept in codes.
    pub(crate) units: [u64; 1],
    /// Strides of the parameter, unless its last index is the fastest.
    pub(crate) strides: Option<Arc<[i64]>>,
    /// Position of the parameter in the plan, if it trains.
    pub(crate) member: Option<usize>,
    /// Lists of the parameter's kernel.
    pub(crate) lists: Arc<[TensorList]>,
    /// PyTorch's own tensor, whose versions are counted without Python.
    pub(crate) known: Option<Known>,
    pub(crate) name: String,
    pub(crate) state: Box<OwnState>,
}

/// Extents of a parameter, and the order of its elements.
pub(crate) struct Form {
    pub(crate) shape: Vec<u64>,
    /// Dense strides; `None` if the last index is the fastest.
    pub(crate) strides: Option<Vec<i64>>,
}

impl Form {
    /// The form of this parameter. `ValueError` for strides that are not dense, by which a step
    /// would reach beyond the parameter.
    pub(crate) fn of(name: &str, shape: Vec<u64>, strides: Option<Vec<i64>>) -> PyResult<Self> {
        if strides.as_ref().is_some_and(|strides| !is_dense(&shape, strides)) {
            let text = format!("parameter `{name}`: expected dense strides, found {strides:?}");
            return Err(PyValueError::new_err(text));
        }
        Ok(Self { shape, strides })
    }
}

impl Parameter {
    /// A parameter that does not train; `last` is the parameter before it.
    pub(crate) fn new(tensor: Py<PyAny>, name: String, form: Form, last: Option<&Self>) -> Self {
        let Form { shape, strides } = form;
        let same = last.filter(|last| *last.shape == *shape);
        let same_order = last.filter(|last| last.strides.as_deref() == strides.as_deref());
        Self {
            tensor,
            shape: same.map_or_else(|| shape.into(), |last| Arc::clone(&last.shape)),
            strides: match same_order {
                Some(last) => last.strides.clone(),
                None => strides.map(Into::into),
            },
            units: [0],
            member: None,
            lists: Arc::default(),
            known: None,
            name,
            state: Box::default(),
        }
    }

    /// Makes the parameter train, as number `member` of the plan, by a kernel with these lists.
    pub(crate) fn train(
        &mut self,
        member: usize,
        lists: &[TensorList],
        keys: &Bound<'_, PyDict>,
        last: Option<&Self>,
    ) -> PyResult<()> {
        self.member = Some(member);
        let numel: u64 = self.shape.iter().product();
        let unit = lists.iter().find(|list| list.role.unit_of().is_some());
        self.units = [unit.map_or(0, |list| list.role.entries(numel))];
        self.lists = match last {
            Some(last) if *last.lists == *lists => Arc::clone(&last.lists),
            _ => lists.into(),
        };
        for (own, list) in self.state.keys.iter_mut().zip(lists) {
            if list.role.is_state() {
                let key = keys.get_item(list.role.name())?.ok_or_else(|| {
                    PyValueError::new_err(format!("keys: expected one for {}", list.role.name()))
                })?;
                *own = Some(PyString::intern(keys.py(), &key.extract::<String>()?).unbind());
            }
        }
        Ok(())
    }

    /// Gives back the parameter's tensors and forgets all that is known of them.
    pub(crate) fn release(&mut self, py: Python<'_>) {
        self.tensor = py.None();
        self.known = None;
        self.state.dict = None;
        self.state.found = Default::default();
    }

    /// Shows the garbage collector the objects that the parameter keeps.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tensor)?;
        visit.call(&self.state.dict)?;
        let mut found = self.state.found.iter();
        found.try_for_each(|found| visit.call(found))
    }

    /// The part of the parameter that a step borrows, if the parameter trains.
    pub(crate) fn borrowed(&self) -> Option<Member> {
        self.member.map(|_| Member {
            // A tensor in host memory has no more elements than a usize counts.
            elements: self.shape.iter().product::<u64>() as usize,
            lists: Arc::clone(&self.lists),
        })
    }
}

/// The state of a parameter in the optimizer's mapping.
#[derive(Default)]
pub(crate) struct OwnState {
    /// Keys of the lists of its kernel in the mapping; `None` for a list that is no state.
    pub(crate) keys: [Option<Py<PyString>>; MAX_LISTS],
    pub(crate) dict: Option<Py<PyDict>>,
    /// Tensors found in the mapping, kept until others take their place.
    pub(crate) found: [Option<Py<PyAny>>; TENSORS],
}

impl OwnState {
    /// Whether no list is state, so that there is at most a count of steps.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.iter().all(Option::is_none)
    }

    /// Looks up tensor number `at`; whether the mapping has it.
    fn find(&mut self, py: Python<'_>, at: usize) -> PyResult<bool> {
        let Some(dict) = &self.dict else {
            return Ok(false);
        };
        let key = match self.keys.get(at) {
            Some(Some(key)) => key.bind(py),
            _ => intern!(py, "step"),
        };
        // SAFETY: both are live objects, the first a dict; the interpreter's lock is held.
        let item = unsafe { ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) };
        let known = &mut self.found[at];
        if item.is_null() {
            *known = None;
            return PyErr::take(py).map_or(Ok(false), Err);
        }
        if known.as_ref().is_none_or(|known| known.as_ptr() != item) {
            // SAFETY: a reference that the dict has, and nobody has run since it gave it.
            *known = Some(unsafe { Py::from_borrowed_ptr(py, item) });
        }
        Ok(true)
    }

    /// Whether the mapping has all the tensors.
    pub(crate) fn find_all(&mut self, py: Python<'_>, counted: bool) -> PyResult<bool> {
        for at in 0..MAX_LISTS {
            if self.keys[at].is_none() {
                continue;
            }
            if !self.find(py, at)? || self.found[at].as_ref().is_none_or(|own| own.is_none(py)) {
                return Ok(false);
            }
        }
        Ok(!counted || self.find(py, COUNT)?)
    }
}

/// Largest ratio of a mapping's parameters to those of a plan at which the mapping's items are
/// compared at each step. In a larger mapping each parameter is looked up.
const MANY_MORE: usize = 4;

/// The optimizer's mapping of parameters to their state, as it was at the last look.
#[derive(Default)]
pub(crate) struct Mapping {
    items: Vec<[Py<PyAny>; 2]>,
    /// Whether a step has added to the mapping since.
    pub(crate) has_grown: bool,
}

impl Mapping {
    /// Whether the mapping was empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Shows the garbage collector the objects that the mapping keeps.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let mut items = self.items.iter().flatten();
        items.try_for_each(|item| visit.call(item))
    }

    /// Looks up the state of all parameters again if the mapping, `state` of `owner`, has changed.
    pub(crate) fn look_through(
        &mut self,
        owner: &Bound<'_, PyAny>,
        parameters: &mut [Parameter],
    ) -> PyResult<()> {
        let py = owner.py();
        let state = owner.getattr(intern!(py, "state"))?;
        let state = state.downcast::<PyDict>()?;
        let mut known = self.items.iter();
        let same = !self.has_grown
            && state.len() == self.items.len()
            && items_of(state, |item| {
                let known = known.next();
                known.is_some_and(|known| known.each_ref().map(Py::as_ptr) == item)
            });
        if same {
            return Ok(());
        }
        let count = parameters.len();
        for parameter in parameters {
            let own = state.get_item(parameter.tensor.bind(py))?;
            parameter.state.dict = match own {
                Some(own) => Some(own.downcast_into::<PyDict>()?.unbind()),
                None => None,
            };
        }
        self.has_grown = false;
        if state.len() > MANY_MORE * count {
            // A few look-ups cost less than a comparison of all other parameters at each step.
            self.items = Vec::new();
            return Ok(());
        }
        let items = state.iter();
        self.items = items.map(|(key, value)| [key.unbind(), value.unbind()]).collect();
        Ok(())
    }
}

/// Whether `is_same` holds for every key and value of a dict; it gets their addresses, to compare
/// them.
fn items_of(
    dict: &Bound<'_, PyDict>,
    mut is_same: impl FnMut([*mut ffi::PyObject; 2]) -> bool,
) -> bool {
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a live dict, which nobody changes meanwhile: the interpreter's lock is held and
    // nothing of Python's runs; there is room for a position, a key and a value.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut at, &mut key, &mut value) } != 0 {
        if !is_same([key, value]) {
            return false;
        }
    }
    true
}

/// The error for parameters with tensors that overlap.
pub(crate) fn overlapping(parameters: &[Parameter], overlap: Overlap) -> PyErr {
    let name_of = |member| {
        let own = parameters.iter().find(|parameter| parameter.member == Some(member));
        own.map_or("", |own| own.name.as_str())
    };
    let (one, other) = (name_of(overlap.0), name_of(overlap.1));
    PyRuntimeError::new_err(format!(
        "`{one}` and `{other}`: expected parameters, gradients and state that do not overlap in \
         memory, found some that do; nothing was updated. Use `.clone()`"
    ))
}
