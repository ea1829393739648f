//! The tensors of a step: parameters, their gradients and their state, found anew at every step.

use std::sync::Arc;

use fusestep::DType;
use fusestep::launch::{MAX_LISTS, TensorList};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use pyo3::{ffi, intern};

use crate::ahead::{Ahead, TENSORS};
use crate::dlpack::{Exchange, Expected, Place, Unfit};
use crate::loan::{GRADIENT, Places, read_count};

/// Most steps that a tensor counts.
const MAX_COUNT: f64 = (1u64 << 53) as f64;

/// A parameter, and what was planned for it.
pub(crate) struct Parameter {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    /// Its position in the plan, if it trains.
    pub(crate) member: Option<usize>,
    /// The lists of its kernel, and their names in its state.
    pub(crate) lists: Arc<[TensorList]>,
    pub(crate) keys: [Option<Py<PyString>>; MAX_LISTS],
    pub(crate) state: Option<Py<PyDict>>,
    /// What was found in its state last, kept until something else is there.
    found: [Option<Py<PyAny>>; TENSORS],
}

impl Parameter {
    /// One that does not train.
    pub(crate) fn new(tensor: Py<PyAny>, name: String, shape: Vec<u64>) -> Self {
        Self {
            tensor,
            name,
            shape,
            member: None,
            lists: Arc::default(),
            keys: Default::default(),
            state: None,
            found: Default::default(),
        }
    }

    /// Looks for a tensor of the state, number `at`; whether there is anything.
    fn find(&mut self, py: Python<'_>, at: usize) -> PyResult<bool> {
        let Some(state) = &self.state else {
            return Ok(false);
        };
        let key = match self.keys.get(at) {
            Some(Some(key)) => key.bind(py),
            _ => intern!(py, "step"),
        };
        // SAFETY: both are live objects, the first a dict; the interpreter's lock is held.
        let item = unsafe { ffi::PyDict_GetItemWithError(state.as_ptr(), key.as_ptr()) };
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

    /// Whether there is all of the state.
    fn find_all(&mut self, py: Python<'_>, counted: bool) -> PyResult<bool> {
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

/// Where a parameter has the tensor that counts its steps, behind those of its lists.
const COUNT: usize = MAX_LISTS;

/// What has been found so far.
pub(crate) struct Collected<'a, 'py> {
    borrowed: &'a mut [Places],
    ahead: &'a mut Ahead,
    /// The steps that each parameter has taken.
    pub(crate) steps: Vec<u64>,
    /// Positions of parameters that have a gradient.
    pub(crate) updated: Vec<usize>,
    /// Tensors that count steps, and what they have counted.
    pub(crate) counts: Vec<(Place, DType, f64)>,
    /// References that keep gradients.
    pub(crate) kept: Vec<Bound<'py, PyAny>>,
    pub(crate) copied: u64,
}

impl<'a> Collected<'a, '_> {
    pub(crate) fn new(
        borrowed: &'a mut [Places],
        ahead: &'a mut Ahead,
        steps: impl Iterator<Item = u64>,
    ) -> Self {
        Self {
            updated: Vec::with_capacity(borrowed.len()),
            counts: Vec::with_capacity(borrowed.len()),
            kept: Vec::with_capacity(borrowed.len()),
            borrowed,
            ahead,
            steps: steps.collect(),
            copied: 0,
        }
    }
}

/// How tensors are found.
pub(crate) struct Collector {
    /// `None` if the library is too old for it.
    pub(crate) exchange: Option<Exchange>,
    /// The Python side: `describe(tensor)` in place of the exchange, `refuse(name, gradient)`.
    pub(crate) library: Py<PyAny>,
    /// Whether steps are counted by a tensor, `step`, in each parameter's state.
    pub(crate) counted: bool,
}

impl Collector {
    /// Finds the tensors of one parameter, number `index` of `owner`'s; `false` if it is not what
    /// was planned for.
    pub(crate) fn collect<'py>(
        &self,
        py: Python<'py>,
        parameter: &mut Parameter,
        (owner, index): (&Bound<'py, PyAny>, usize),
        gradients: Option<&Bound<'py, PyList>>,
        found: &mut Collected<'_, 'py>,
    ) -> PyResult<bool> {
        found.ahead.ask(index);
        let tensor = parameter.tensor.bind(py);
        let gradient = match gradients {
            Some(gradients) => gradients.get_item(index)?,
            None => tensor.getattr(intern!(py, "grad"))?,
        };
        let Some(member) = parameter.member else {
            return Ok(gradient.is_none());
        };
        found.borrowed[member] = None;
        if gradient.is_none() {
            return Ok(true);
        }
        let mut places = [Place::default(); MAX_LISTS];
        match self.place(tensor, expected(parameter, 0)) {
            Ok(place) => places[0] = place,
            Err(_) => return Ok(false),
        }
        found.ahead.saw(index, 0, tensor);
        found.ahead.saw(index, GRADIENT, &gradient);
        let (place, gradient) = self.gradient(parameter, gradient, found)?;
        places[GRADIENT] = place;
        found.kept.push(gradient);
        self.state_of(py, parameter, (owner, index), (&mut places, member), found)?;
        found.borrowed[member] = Some(places);
        found.updated.push(index);
        Ok(true)
    }

    /// Finds the gradient, or a copy of one whose elements do not lie in order.
    fn gradient<'py>(
        &self,
        parameter: &Parameter,
        gradient: Bound<'py, PyAny>,
        found: &mut Collected<'_, 'py>,
    ) -> PyResult<(Place, Bound<'py, PyAny>)> {
        let py = gradient.py();
        let own = expected(parameter, GRADIENT);
        let unfit = match self.place(&gradient, own) {
            Ok(place) => return Ok((place, gradient)),
            Err(unfit) => unfit,
        };
        // Python's side raises what PyTorch would for sparse gradients and the like.
        let library = self.library.bind(py);
        library.call_method1("refuse", (&parameter.name, &parameter.tensor, &gradient))?;
        if let Unfit::Strides | Unfit::Alignment | Unfit::Negated = unfit {
            let copy = gradient.call_method0("clone")?.call_method0("contiguous")?;
            found.copied += 1;
            let place = self.place(&copy, own);
            let place = place.map_err(|unfit| misfit(parameter, "gradient", own, unfit))?;
            return Ok((place, copy));
        }
        Err(misfit(parameter, "gradient", own, unfit))
    }

    /// Finds the state beside a parameter, which `owner` makes if it is not there.
    fn state_of<'py>(
        &self,
        py: Python<'py>,
        parameter: &mut Parameter,
        (owner, index): (&Bound<'py, PyAny>, usize),
        (places, member): (&mut [Place; MAX_LISTS], usize),
        collected: &mut Collected<'_, 'py>,
    ) -> PyResult<()> {
        if !self.counted && parameter.keys.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut first = false;
        if !parameter.find_all(py, self.counted)? {
            let state = owner.call_method1(intern!(py, "_make_state"), (index,))?;
            let (state, none): (Py<PyDict>, bool) = state.extract()?;
            parameter.state = Some(state);
            first = none;
            parameter.find_all(py, self.counted)?;
        }
        for (list, key) in parameter.keys.iter().enumerate() {
            let Some(key) = key else { continue };
            let Some(own) = &parameter.found[list] else {
                let text = format!("`{}`: expected `{key}` in its state", parameter.name);
                return Err(PyValueError::new_err(text));
            };
            let own = own.bind(py);
            let wanted = expected(parameter, list);
            let place = self.place(own, wanted);
            places[list] =
                place.map_err(|unfit| misfit(parameter, &key.to_string(), wanted, unfit))?;
            collected.ahead.saw(index, list, own);
        }
        if self.counted {
            collected.steps[member] = self.count(py, parameter, index, collected)?;
        } else {
            // Rules that count nothing tell a first step from all others.
            let steps = &mut collected.steps[member];
            *steps = if first { 0 } else { (*steps).max(1) };
        }
        Ok(())
    }

    /// Reads what the tensor `step` counts.
    fn count(
        &self,
        py: Python<'_>,
        parameter: &Parameter,
        index: usize,
        collected: &mut Collected<'_, '_>,
    ) -> PyResult<u64> {
        let step = parameter.found[COUNT].as_ref();
        let step = step.ok_or_else(|| PyValueError::new_err("expected `step`, found none"))?;
        let step = step.bind(py);
        for dtype in [DType::F32, DType::F64] {
            let one = Expected { dtype, shape: &[] };
            let Ok(place) = self.look(step, one) else {
                continue;
            };
            // SAFETY: the place of a tensor of one element of this dtype, found just now and kept
            // by `parameter`; the interpreter's lock is held.
            let count = unsafe { read_count(place, dtype) };
            if !(0.0..MAX_COUNT).contains(&count) {
                break;
            }
            collected.counts.push((place, dtype, count));
            collected.ahead.saw(index, COUNT, step);
            return Ok(count as u64);
        }
        Err(PyValueError::new_err(format!(
            "`{}`: expected `step` to be a float32 or float64 scalar on the CPU, of 0 or more, \
             found {}",
            parameter.name,
            step.repr()?
        )))
    }

    /// Where a tensor lies, whose values are those in memory.
    fn place(&self, tensor: &Bound<'_, PyAny>, expected: Expected<'_>) -> Result<Place, Unfit> {
        let place = self.look(tensor, expected)?;
        if place.len_bytes == expected.dtype.len_bytes()
            && let Some(exchange) = &self.exchange
            && exchange.is_negated(tensor).map_err(Unfit::NoMemory)?
        {
            return Err(Unfit::Negated);
        }
        Ok(place)
    }

    /// Where a tensor lies.
    fn look(&self, tensor: &Bound<'_, PyAny>, expected: Expected<'_>) -> Result<Place, Unfit> {
        match &self.exchange {
            Some(exchange) => exchange.place(tensor, expected),
            None => self.told(tensor, expected),
        }
    }

    /// Where a tensor lies, by what its methods tell.
    fn told(&self, tensor: &Bound<'_, PyAny>, expected: Expected<'_>) -> Result<Place, Unfit> {
        let told = self
            .library
            .bind(tensor.py())
            .call_method1("describe", (tensor,));
        let told = told.and_then(|told| told.extract());
        let (address, dtype, shape, in_order): (usize, String, Vec<i64>, bool) =
            told.map_err(Unfit::NoMemory)?;
        let dtype = crate::session::dtype_of(&dtype).ok();
        if dtype != Some(expected.dtype) {
            return Err(Unfit::DType(dtype));
        }
        let same = shape
            .iter()
            .map(|&n| n as u64)
            .eq(expected.shape.iter().copied());
        match (same, in_order) {
            (false, _) => Err(Unfit::Shape(shape)),
            (true, false) => Err(Unfit::Strides),
            (true, true) => Place::told(address, expected),
        }
    }
}

fn expected(parameter: &Parameter, list: usize) -> Expected<'_> {
    Expected {
        dtype: parameter.lists[list].dtype,
        shape: &parameter.shape,
    }
}

/// What does not fit, in PyTorch's kinds.
fn misfit(parameter: &Parameter, what: &str, expected: Expected<'_>, unfit: Unfit) -> PyErr {
    let Expected { dtype, shape } = expected;
    let text = |found: String| {
        PyValueError::new_err(format!(
            "{what} of `{}`: expected a contiguous {dtype} tensor of shape {shape:?} on the CPU, \
             found {found}",
            parameter.name
        ))
    };
    match unfit {
        Unfit::NoMemory(error) => text(format!("one without memory ({error})")),
        Unfit::Device => text("one on another device".to_owned()),
        Unfit::DType(Some(found)) => text(format!("{found}")),
        Unfit::DType(None) => text("a dtype that no kernel takes".to_owned()),
        Unfit::Shape(found) => text(format!("shape {found:?}")),
        Unfit::Strides => text("strides".to_owned()),
        Unfit::Negated => text("a negated view".to_owned()),
        Unfit::Alignment => text("an address that is no multiple of its elements'".to_owned()),
    }
}
