//! Collection of a step's tensors: parameters, gradients and state. They are found anew at every
//! step, unless nobody else can have them.

use fusestep::DType;
use fusestep::launch::TensorList;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::ahead::Ahead;
use crate::getter::Getter;
use crate::handle::Handles;
use crate::loan::{GRADIENT, Places, read_count, write_count};
use crate::parameter::{COUNT, Parameter};
use crate::private::Private;
use crate::tensor::{Expected, Order, Place, Told, Unfit};

/// Bound on the number of steps that a tensor counts; the number is below it.
const MAX_COUNT: f64 = (1u64 << 53) as f64;

/// Source of the gradients.
pub(crate) enum Gradients<'a, 'py> {
    /// A list, in the order of the parameters.
    Given(&'a Bound<'py, PyList>),
    /// The property `grad` of each parameter.
    Own(Getter<'a, 'py>),
}

impl<'py> Gradients<'_, 'py> {
    #[inline]
    fn of(&self, index: usize, parameter: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Given(gradients) => gradients.get_item(index),
            Self::Own(getter) => getter.get(parameter),
        }
    }
}

/// Collection of a step that is under way.
pub(crate) struct Collected<'a, 'py> {
    places: &'a mut Places,
    ahead: &'a mut Ahead,
    private: &'a Private,
    asks_for_state: bool,
    pub(crate) found: Found<'py>,
}

/// Facts about the tensors of a step, besides their places.
pub(crate) struct Found<'py> {
    /// Number of steps that each parameter has taken.
    pub(crate) steps: Vec<u64>,
    /// Positions of parameters that have a gradient.
    pub(crate) updated: Vec<usize>,
    /// Members of the plan whose state was looked at.
    pub(crate) looked: Vec<usize>,
    /// Tensors that count steps, and the numbers of steps that they count.
    pub(crate) counts: Vec<(Place, DType, f64)>,
    /// References that keep gradients alive.
    kept: Vec<Bound<'py, PyAny>>,
    pub(crate) copied: u64,
    /// Whether the owner has made state in this step.
    pub(crate) made_state: bool,
}

impl<'a> Collected<'a, '_> {
    pub(crate) fn new(
        places: &'a mut Places,
        ahead: &'a mut Ahead,
        private: &'a Private,
        steps: impl ExactSizeIterator<Item = u64>,
    ) -> Self {
        Self {
            places,
            ahead,
            private,
            asks_for_state: !private.has_any(),
            found: Found {
                updated: Vec::with_capacity(steps.len()),
                looked: Vec::new(),
                counts: Vec::new(),
                kept: Vec::with_capacity(steps.len()),
                steps: steps.collect(),
                copied: 0,
                made_state: false,
            },
        }
    }
}

/// Way of finding tensors.
pub(crate) struct Collector {
    /// Access through PyTorch's C interface; `None` if the library's tensors cannot be looked at
    /// through it.
    pub(crate) handles: Option<Handles>,
    /// The library's Python side, with `describe(tensor)` in place of handles, and `refuse(name,
    /// parameter, gradient)`.
    pub(crate) library: Py<PyAny>,
    /// Name of the memory in which all tensors lie but those that count steps.
    pub(crate) memory: String,
    /// Whether a tensor `step` in each parameter's state counts its steps.
    pub(crate) counted: bool,
}

impl Collector {
    /// Finds the tensors of one parameter, number `index` among those of `owner`. `false` if the
    /// parameter is no longer as planned.
    pub(crate) fn collect<'py>(
        &self,
        py: Python<'py>,
        parameter: &mut Parameter,
        (owner, index): (&Bound<'py, PyAny>, usize),
        gradients: &Gradients<'_, 'py>,
        collected: &mut Collected<'_, 'py>,
    ) -> PyResult<bool> {
        collected.ahead.ask(index, collected.asks_for_state);
        let tensor = parameter.tensor.bind(py);
        let gradient = gradients.of(index, tensor)?;
        let Some(member) = parameter.member else {
            return Ok(gradient.is_none());
        };
        collected.places.set_has_gradient(member, false);
        if gradient.is_none() {
            return Ok(true);
        }
        match self.place(tensor, expected(parameter, 0)) {
            Ok(place) => collected.places.of_mut(member)[0] = place.address,
            Err(_) => return Ok(false),
        }
        collected.ahead.saw(index, 0, tensor);
        collected.ahead.saw(index, GRADIENT, &gradient);
        let Some((place, gradient)) = self.gradient(parameter, gradient, collected)? else {
            return Ok(false);
        };
        collected.places.of_mut(member)[GRADIENT] = place.address;
        collected.found.kept.push(gradient);
        if !collected.private.has(member) {
            self.state_of(py, parameter, (owner, index), member, collected)?;
            collected.found.looked.push(member);
        }
        collected.places.set_has_gradient(member, true);
        collected.found.updated.push(index);
        Ok(true)
    }

    /// Finds the gradient, or makes a copy of a gradient whose elements do not lie in order, or are
    /// of 16 bits where others of the parameter's dtype have theirs in f32. `None` for one in f32
    /// where the plan has none.
    fn gradient<'py>(
        &self,
        parameter: &Parameter,
        gradient: Bound<'py, PyAny>,
        collected: &mut Collected<'_, 'py>,
    ) -> PyResult<Option<(Place, Bound<'py, PyAny>)>> {
        let py = gradient.py();
        let own = expected(parameter, GRADIENT);
        let unfit = match self.place(&gradient, own) {
            Ok(place) => return Ok(Some((place, gradient))),
            Err(unfit) => unfit,
        };
        // The Python side raises the error that PyTorch would raise, for example for sparse
        // gradients.
        let library = self.library.bind(py);
        library.call_method1("refuse", (&parameter.name, &parameter.tensor, &gradient))?;
        let (like, narrow) = (parameter.tensor.bind(py), parameter.lists[0].dtype);
        let copy = match unfit {
            Unfit::DType(Some(DType::F32)) if is_of_16_bits(narrow) => return Ok(None),
            Unfit::DType(Some(found)) if found == narrow && own.dtype == DType::F32 => {
                library.call_method1("widened", (like, &gradient))?
            }
            Unfit::Strides | Unfit::Alignment | Unfit::Negated if parameter.strides.is_none() => {
                gradient.call_method0("clone")?.call_method0("contiguous")?
            }
            Unfit::Strides | Unfit::Alignment | Unfit::Negated => {
                library.call_method1("in_order_of", (like, &gradient))?
            }
            other => return Err(self.misfit(parameter, "gradient", own, other)),
        };
        collected.found.copied += 1;
        let place = self.place(&copy, own);
        let place = place.map_err(|unfit| self.misfit(parameter, "gradient", own, unfit))?;
        Ok(Some((place, copy)))
    }

    /// Finds the state of a parameter; `owner` makes the state if it is missing.
    fn state_of<'py>(
        &self,
        py: Python<'py>,
        parameter: &mut Parameter,
        (owner, index): (&Bound<'py, PyAny>, usize),
        member: usize,
        collected: &mut Collected<'_, 'py>,
    ) -> PyResult<()> {
        if !self.counted && parameter.state.is_empty() {
            return Ok(());
        }
        let mut first = false;
        if !parameter.state.find_all(py, self.counted)? {
            let state = owner.call_method1(intern!(py, "_make_state"), (index,))?;
            let (state, none): (Py<PyDict>, bool) = state.extract()?;
            parameter.state.dict = Some(state);
            collected.found.made_state = true;
            first = none;
            parameter.state.find_all(py, self.counted)?;
        }
        for (list, key) in parameter.state.keys.iter().enumerate() {
            let Some(key) = key else { continue };
            let Some(own) = &parameter.state.found[list] else {
                let text = format!("`{}`: expected `{key}` in its state", parameter.name);
                return Err(PyValueError::new_err(text));
            };
            let own = own.bind(py);
            let wanted = expected(parameter, list);
            let place = match self.place(own, wanted) {
                Err(Unfit::Strides) => self.reordered(parameter, own, wanted)?,
                place => place,
            };
            let place =
                place.map_err(|unfit| self.misfit(parameter, &key.to_string(), wanted, unfit))?;
            collected.places.of_mut(member)[list] = place.address;
            collected.ahead.saw(index, list, own);
        }
        if self.counted {
            collected.found.steps[member] = self.count(py, parameter, index, collected)?;
        } else {
            // Rules that count no steps only need to know whether a step is the first.
            let steps = &mut collected.found.steps[member];
            *steps = if first { 0 } else { (*steps).max(1) };
        }
        Ok(())
    }

    /// Has the library bring state to the order of the parameter, whose memory format may have
    /// changed since the last step. Values stay.
    fn reordered(
        &self,
        parameter: &Parameter,
        own: &Bound<'_, PyAny>,
        wanted: Expected<'_>,
    ) -> PyResult<Result<Place, Unfit>> {
        if wanted.dtype == DType::U8 {
            // Units are those of groups in the order that codes have.
            return Ok(Err(Unfit::Strides));
        }
        let library = self.library.bind(own.py());
        if library.hasattr(intern!(own.py(), "reorder"))? {
            library.call_method1(intern!(own.py(), "reorder"), (&parameter.tensor, own))?;
        }
        Ok(self.place(own, wanted))
    }

    /// Reads the number of steps from the tensor `step`.
    fn count(
        &self,
        py: Python<'_>,
        parameter: &Parameter,
        index: usize,
        collected: &mut Collected<'_, '_>,
    ) -> PyResult<u64> {
        let step = parameter.state.found[COUNT].as_ref();
        let step = step.ok_or_else(|| PyValueError::new_err("expected `step`, found none"))?;
        let step = step.bind(py);
        if let Some((place, dtype)) = self.counter(step) {
            // SAFETY: the place of a tensor of one element of this dtype, found just now and kept
            // by `parameter`; the interpreter's lock is held.
            let count = unsafe { read_count(place, dtype) };
            if (0.0..MAX_COUNT).contains(&count) {
                collected.found.counts.push((place, dtype, count));
                collected.ahead.saw(index, COUNT, step);
                return Ok(count as u64);
            }
        }
        Err(PyValueError::new_err(format!(
            "`{}`: expected `step` to be a float32 or float64 scalar on the CPU, of 0 or more, \
             found {}",
            parameter.name,
            step.repr()?
        )))
    }

    /// The place and the dtype of a tensor, if it can count steps.
    fn counter(&self, step: &Bound<'_, PyAny>) -> Option<(Place, DType)> {
        let mut dtypes = [DType::F32, DType::F64].into_iter();
        dtypes.find_map(|dtype| {
            let place = self.place_on_host(step, Expected { dtype, shape: &[], strides: None });
            Some((place.ok()?, dtype))
        })
    }

    /// Writes the number of steps of a parameter to the tensor that counts them, if there is one.
    pub(crate) fn write_steps(&self, py: Python<'_>, parameter: &Parameter, steps: u64) {
        let step = parameter.state.found[COUNT].as_ref();
        if let Some((place, dtype)) = step.and_then(|step| self.counter(step.bind(py))) {
            // SAFETY: the place of a tensor of one element of this dtype, found just now and kept
            // by `parameter`; the interpreter's lock is held.
            unsafe { write_count(place, dtype, steps as f64) };
        }
    }

    /// The place of a tensor whose values are those in memory.
    #[inline]
    fn place(&self, tensor: &Bound<'_, PyAny>, expected: Expected<'_>) -> Result<Place, Unfit> {
        match &self.handles {
            Some(handles) => handles.place(tensor, expected),
            None => self.told(tensor, expected, DESCRIBE),
        }
    }

    /// The place of a tensor in host memory, as those that count steps.
    fn place_on_host(
        &self,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        match &self.handles {
            Some(handles) => handles.place_on_host(tensor, expected),
            None => {
                let library = self.library.bind(tensor.py());
                let has = library.hasattr(DESCRIBE_ON_HOST).map_err(Unfit::NoMemory)?;
                self.told(tensor, expected, if has { DESCRIBE_ON_HOST } else { DESCRIBE })
            }
        }
    }

    /// The place of a tensor, as its methods in Python tell it to this function of the library.
    fn told(
        &self,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
        describe: &str,
    ) -> Result<Place, Unfit> {
        let library = self.library.bind(tensor.py());
        let told = library.call_method1(describe, (tensor,));
        let told = told.and_then(|told| told.extract());
        let (address, dtype, shape, order): (_, String, Vec<i64>, Order) =
            told.map_err(Unfit::NoMemory)?;
        let told = Told {
            dtype: crate::described::dtype_of(&dtype).ok(),
            shape: &shape,
            is_in_order: order.fits(&shape, expected.strides),
            address,
        };
        told.place(expected)
    }

    /// The error for a tensor that does not fit, of PyTorch's kind.
    fn misfit(
        &self,
        parameter: &Parameter,
        what: &str,
        expected: Expected<'_>,
        unfit: Unfit,
    ) -> PyErr {
        let Expected { dtype, shape, strides } = expected;
        let order =
            strides.map_or_else(|| "contiguous".to_owned(), |own| format!("strided {own:?}"));
        let text = |found: String| {
            PyValueError::new_err(format!(
                "{what} of `{}`: expected a {order} {dtype} tensor of shape {shape:?} on {}, found \
                 {found}",
                parameter.name, self.memory
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
}

fn is_of_16_bits(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

fn expected(parameter: &Parameter, list: usize) -> Expected<'_> {
    let TensorList { role, dtype, .. } = parameter.lists[list];
    if role.unit_of().is_some() {
        return Expected { dtype, shape: &parameter.units, strides: None };
    }
    Expected { dtype, shape: &parameter.shape, strides: parameter.strides.as_deref() }
}

/// Functions of a library that tell where a tensor lies: one of those that are stepped, and one
/// that counts steps.
const DESCRIBE: &str = "describe";
const DESCRIBE_ON_HOST: &str = "describe_on_host";
