//! The tensors of a step: parameters, their gradients and their state, found anew at every step.

use fusestep::DType;
use fusestep::launch::{MAX_LISTS, TensorList};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

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
    pub(crate) lists: Box<[TensorList]>,
    pub(crate) keys: [Option<Py<PyString>>; MAX_LISTS],
    pub(crate) state: Option<Py<PyDict>>,
}

impl Parameter {
    /// One that does not train.
    pub(crate) fn new(tensor: Py<PyAny>, name: String, shape: Vec<u64>) -> Self {
        Self {
            tensor,
            name,
            shape,
            member: None,
            lists: Box::default(),
            keys: Default::default(),
            state: None,
        }
    }
}

/// What has been found so far.
pub(crate) struct Collected<'a, 'py> {
    borrowed: &'a mut [Places],
    /// The steps that each parameter has taken.
    pub(crate) steps: Vec<u64>,
    /// Positions of parameters that have a gradient.
    pub(crate) updated: Vec<usize>,
    /// Tensors that count steps, and what they have counted.
    pub(crate) counts: Vec<(Place, DType, f64)>,
    /// References that keep what was found.
    pub(crate) kept: Vec<Bound<'py, PyAny>>,
    pub(crate) copied: u64,
}

impl<'a> Collected<'a, '_> {
    pub(crate) fn new(borrowed: &'a mut [Places], steps: impl Iterator<Item = u64>) -> Self {
        Self {
            updated: Vec::with_capacity(borrowed.len()),
            counts: Vec::with_capacity(borrowed.len()),
            kept: Vec::with_capacity(borrowed.len() * 4),
            borrowed,
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
        let tensor = parameter.tensor.bind(py).clone();
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
        match self.place(&tensor, expected(parameter, 0)) {
            Ok(place) => places[0] = place,
            Err(_) => return Ok(false),
        }
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
        if let Unfit::Strides | Unfit::Alignment = unfit {
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
        found: &mut Collected<'_, 'py>,
    ) -> PyResult<()> {
        if !self.counted && parameter.keys.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut first = false;
        if !self.is_complete(py, parameter)? {
            let state = owner.call_method1(intern!(py, "_make_state"), (index,))?;
            let (state, none): (Py<PyDict>, bool) = state.extract()?;
            parameter.state = Some(state);
            first = none;
        }
        let Some(state) = &parameter.state else {
            return Ok(());
        };
        let state = state.bind(py);
        for (list, key) in parameter.keys.iter().enumerate() {
            let Some(key) = key else { continue };
            let Some(own) = state.get_item(key.bind(py))? else {
                let text = format!("`{}`: expected `{key}` in its state", parameter.name);
                return Err(PyValueError::new_err(text));
            };
            let wanted = expected(parameter, list);
            let place = self.place(&own, wanted);
            places[list] =
                place.map_err(|unfit| misfit(parameter, &key.to_string(), wanted, unfit))?;
            found.kept.push(own);
        }
        if self.counted {
            found.steps[member] = self.count(py, parameter, state, found)?;
        } else {
            // Rules that count nothing tell a first step from all others.
            found.steps[member] = if first { 0 } else { found.steps[member].max(1) };
        }
        Ok(())
    }

    /// Whether there is all of a parameter's state.
    fn is_complete(&self, py: Python<'_>, parameter: &Parameter) -> PyResult<bool> {
        let Some(state) = &parameter.state else {
            return Ok(false);
        };
        let state = state.bind(py);
        for key in parameter.keys.iter().flatten() {
            match state.get_item(key.bind(py))? {
                Some(own) if !own.is_none() => {}
                _ => return Ok(false),
            }
        }
        Ok(!self.counted || state.get_item(intern!(py, "step"))?.is_some())
    }

    /// Reads what the tensor `step` counts.
    fn count<'py>(
        &self,
        py: Python<'py>,
        parameter: &Parameter,
        state: &Bound<'py, PyDict>,
        found: &mut Collected<'_, 'py>,
    ) -> PyResult<u64> {
        let step = state.get_item(intern!(py, "step"))?;
        let step = step.ok_or_else(|| PyValueError::new_err("expected `step`, found none"))?;
        for dtype in [DType::F32, DType::F64] {
            let one = Expected { dtype, shape: &[] };
            let Ok(place) = self.place(&step, one) else {
                continue;
            };
            // SAFETY: the place of a tensor of one element of this dtype, found just now and kept
            // by `step`; the interpreter's lock is held.
            let count = unsafe { read_count(place, dtype) };
            if !(0.0..MAX_COUNT).contains(&count) {
                break;
            }
            found.counts.push((place, dtype, count));
            found.kept.push(step);
            return Ok(count as u64);
        }
        Err(PyValueError::new_err(format!(
            "`{}`: expected `step` to be a float32 or float64 scalar on the CPU, of 0 or more, \
             found {}",
            parameter.name,
            step.repr()?
        )))
    }

    /// Where a tensor lies.
    fn place(&self, tensor: &Bound<'_, PyAny>, expected: Expected<'_>) -> Result<Place, Unfit> {
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
        Unfit::Alignment => text("an address that is no multiple of its elements'".to_owned()),
    }
}
