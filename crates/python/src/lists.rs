//! Steps over lists of tensors, which are looked at anew at every call: nothing is planned, so
//! tensors may be others each time.

use std::num::NonZeroUsize;

use fusestep::Pool;
use fusestep::fused_adam::{
    Adam, AdamBefore, BiasCorrection, CodedState, Floats, FloatsMut, MixedAdamTensors, MixedStep,
    Objective, SecondMoment, StateMut, StepError, WeightDecay, square_sums,
};
use fusestep::{DType, launch::UpdateRule};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::cores::Cores;
use crate::errors::refused;
use crate::listed::{FLOATS, Form, Listed, Looks, NARROW, Role, STATE};
use crate::threads;

/// Names of the lists of state, then those of their units.
const NAMES: [&str; 6] = [
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_avg_units",
    "exp_avg_sq_units",
    "max_exp_avg_sq_units",
];

/// Most lists of state with their units.
const MOST: usize = NAMES.len();

/// Settings of Adam and of a step, in this order.
#[derive(FromPyObject)]
struct Settings(Numbers, Switches);

/// Rate, decays of both moments, ε and λ.
#[derive(FromPyObject)]
struct Numbers(f64, f64, f64, f64, f64);

/// Whether λ is decoupled, the largest second moment counts, the objective is maximized, and
/// moments are corrected.
#[derive(FromPyObject)]
struct Switches(bool, bool, bool, bool);

impl Settings {
    fn adam(&self) -> PyResult<Adam> {
        let Numbers(lr, beta1, beta2, eps, lambda) = self.0;
        let Switches(is_decoupled, amsgrad, maximize, _) = self.1;
        let adam = Adam {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay: if is_decoupled {
                WeightDecay::Decoupled(lambda)
            } else {
                WeightDecay::L2(lambda)
            },
            second_moment: if amsgrad { SecondMoment::Largest } else { SecondMoment::Running },
            objective: if maximize { Objective::Maximize } else { Objective::Minimize },
        };
        adam.validate().map_err(refused)?;
        Ok(adam)
    }
}

/// Threads of a call: so many, or one on each of these CPUs.
#[derive(FromPyObject)]
enum Workers {
    Count(usize),
    Cores(Vec<usize>),
}

impl Workers {
    /// Runs work on these threads, without the interpreter's lock.
    fn run<R: Send>(self, py: Python<'_>, work: impl FnOnce(&Pool) -> R + Send) -> PyResult<R> {
        match self {
            Self::Count(count) => {
                let count = NonZeroUsize::new(count);
                let refuse = || PyValueError::new_err("cores: expected at least 1, found 0");
                let backend = threads::backend(count.ok_or_else(refuse)?)?;
                Ok(py.detach(|| work(backend.pool())))
            }
            Self::Cores(numbers) => {
                let cores = Cores::of(numbers)?;
                Ok(py.detach(|| cores.run(work)))
            }
        }
    }
}

/// The lists of one parameter.
struct Tensor {
    step: u64,
    param: Listed,
    grad: Listed,
    copy: Option<Listed>,
    state: [Listed; MOST],
    before: Option<Before>,
}

/// Places for parameter and state as they were.
struct Before {
    param: Listed,
    state: [Listed; MOST],
}

/// Parameters with the same settings.
struct Group {
    adam: Adam,
    bias_correction: BiasCorrection,
    /// Number of lists of state.
    count: usize,
    tensors: Vec<Tensor>,
}

impl Group {
    fn new(settings: &Settings, tensors: usize) -> PyResult<Self> {
        let Switches(_, amsgrad, _, is_corrected) = settings.1;
        Ok(Self {
            adam: settings.adam()?,
            bias_correction: if is_corrected { BiasCorrection::On } else { BiasCorrection::Off },
            count: if amsgrad { 3 } else { 2 },
            tensors: Vec::with_capacity(tensors),
        })
    }

    /// Applies the step. All that could be refused has been looked at.
    ///
    /// # Safety
    /// As for [`slices_of`], of all tensors.
    unsafe fn step(&self, pool: &Pool, grad_factor: f64) -> Result<(), StepError> {
        let bias_correction = self.bias_correction;
        let how = MixedStep { pool: Some(pool), grad_factor, bias_correction };
        // SAFETY: as the caller promises.
        let lists = self.tensors.iter().map(|tensor| unsafe { slices_of(tensor, self.count) });
        self.adam.step_mixed(how, lists.collect())
    }
}

/// Steps over lists of tensors.
#[pyclass(module = "fusestep._fusestep", frozen)]
pub(crate) struct Lists {
    looks: Looks,
}

#[pymethods]
impl Lists {
    /// Looks at tensors of this library from now on.
    #[new]
    fn new(library: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { looks: Looks::of(library)? })
    }

    /// Applies one step of Adam to the entries of each call, a pair of settings and entries. An
    /// entry is name, number of its step, parameter, gradient, copy or `None`, tuple of state, and
    /// a tuple of parameter and state to be filled with what was before, or `None`. Everything is
    /// checked before anything is written.
    #[pyo3(signature = (calls, workers, grad_factor))]
    fn step(
        &self,
        py: Python<'_>,
        calls: Vec<(Bound<'_, PyAny>, Bound<'_, PyList>)>,
        workers: Workers,
        grad_factor: f64,
    ) -> PyResult<()> {
        if !grad_factor.is_finite() {
            return Err(refused(StepError::GradFactor { found: grad_factor }));
        }
        let mut copies = Vec::new();
        let mut form = Form::default();
        let mut groups = Vec::with_capacity(calls.len());
        for (settings, entries) in &calls {
            let settings: Settings = settings.extract()?;
            let mut group = Group::new(&settings, entries.len())?;
            for entry in entries {
                let entry = entry.downcast_into::<PyTuple>()?;
                let tensor = self.tensor(&entry, group.count, &mut form, &mut copies)?;
                group.tensors.push(tensor);
            }
            groups.push(group);
        }
        check_apart(&groups, &calls)?;
        let stepped = workers.run(py, move |pool| {
            // SAFETY: the entries keep their tensors, which were found in this call, and the
            // copies of gradients are kept until it ends; no written list overlaps another. Other
            // threads that write to them meanwhile race, as they would with PyTorch's own kernels.
            groups.iter().try_for_each(|group| unsafe { group.step(pool, grad_factor) })
        })?;
        stepped.map_err(refused)
    }

    /// The sum of squares over gradients, of which those of `None` count as zeros in their places,
    /// and the number of elements that are infinite or NaN.
    #[pyo3(signature = (gradients, workers))]
    fn square_sum(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyList>,
        workers: Workers,
    ) -> PyResult<(f64, u64)> {
        let mut form = Form::default();
        let (mut lists, mut copies) = (Vec::with_capacity(gradients.len()), Vec::new());
        for (index, gradient) in gradients.iter().enumerate() {
            if gradient.is_none() {
                lists.push(Listed::NONE);
                continue;
            }
            let name = index.into_pyobject(py)?.into_any();
            let role = Role { list: "gradient", name: &name, dtypes: FLOATS };
            lists.push(self.looks.whole(role, &gradient, &mut form, &mut copies)?);
        }
        let sum = workers.run(py, move |pool| {
            // SAFETY: the list keeps its tensors, which were found in this call; they are read.
            let lists = lists.iter().filter_map(|list| unsafe { floats(*list) });
            square_sums(Some(pool), &lists.collect::<Vec<_>>())
        })?;
        Ok((sum.sum, sum.non_finite))
    }
}

impl Lists {
    /// Finds the lists of one entry.
    fn tensor<'py>(
        &self,
        entry: &Bound<'py, PyTuple>,
        count: usize,
        form: &mut Form,
        copies: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Tensor> {
        let name = &entry.get_item(0)?;
        let step: u64 = entry.get_item(1)?.extract()?;
        if step == 0 {
            return Err(refused(StepError::StepZero));
        }
        let role = |list, dtypes| Role { list, name, dtypes };
        let own = entry.get_item(2)?;
        let param = self.looks.param(role("parameter", FLOATS), &own, form)?;
        let grad = entry.get_item(3)?;
        let grad = self.looks.grad(role("gradient", FLOATS), &own, &grad, form, copies)?;
        let copy = entry.get_item(4)?;
        let copy = if copy.is_none() {
            None
        } else {
            if param.dtype != DType::F32 {
                let found = param.dtype.name();
                return Err(PyTypeError::new_err(format!(
                    "copy of `{name}`: expected none, since the parameter is {found} and no f32, \
                     found one"
                )));
            }
            Some(self.looks.beside(role("copy", NARROW), &copy, form)?)
        };
        let state = entry.get_item(5)?.downcast_into::<PyTuple>()?;
        let state = self.state(name, &state, count, form)?;
        let before = entry.get_item(6)?;
        let before = if before.is_none() {
            None
        } else {
            let before = before.downcast_into::<PyTuple>()?;
            let room = before.get_item(0)?;
            let room = self.looks.beside(role("parameter before", FLOATS), &room, form)?;
            let own = before.get_slice(1, before.len());
            let own = self.state(name, &own, count, form)?;
            let expected = [param.dtype.name(), state[0].dtype.name()];
            let found = [room.dtype.name(), own[0].dtype.name()];
            if expected != found {
                return Err(PyTypeError::new_err(format!(
                    "room of `{name}`: expected parameter and state in {}, found {}",
                    expected.join(" and "),
                    found.join(" and ")
                )));
            }
            Some(Before { param: room, state: own })
        };
        Ok(Tensor { step, param, grad, copy, state, before })
    }

    /// Finds `count` lists of state, and as many lists of units if they are codes.
    fn state(
        &self,
        name: &Bound<'_, PyAny>,
        state: &Bound<'_, PyTuple>,
        count: usize,
        form: &Form,
    ) -> PyResult<[Listed; MOST]> {
        let mut lists = [Listed::NONE; MOST];
        for (at, own) in state.iter_borrowed().enumerate().take(count) {
            let role = Role { list: NAMES[at], name, dtypes: STATE };
            lists[at] = self.looks.beside(role, &own, form)?;
            if lists[at].dtype != lists[0].dtype {
                let (expected, found) = (lists[0].dtype.name(), lists[at].dtype.name());
                return Err(PyTypeError::new_err(format!(
                    "{} of `{name}`: expected {expected}, which exp_avg has, found {found}",
                    NAMES[at]
                )));
            }
        }
        let is_coded = lists[0].dtype == DType::U8;
        let expected = if is_coded { 2 * count } else { count };
        if state.len() != expected {
            let names = if is_coded { "lists with units" } else { "lists" };
            let found = state.len();
            return Err(PyValueError::new_err(format!(
                "state of `{name}`: expected {expected} {names}, found {found}"
            )));
        }
        for (at, own) in state.iter_borrowed().enumerate().skip(count) {
            let at = MOST / 2 + at - count;
            let role = Role { list: NAMES[at], name, dtypes: &[DType::F32] };
            lists[at] = self.looks.units(role, &own, form)?;
        }
        Ok(lists)
    }
}

/// Elements to be read; `None` never, as the dtype and the address were looked at.
///
/// # Safety
/// As for [`Listed::bytes`].
unsafe fn floats<'a>(list: Listed) -> Option<Floats<'a>> {
    // SAFETY: as the caller promises.
    Floats::of_bytes(list.dtype, unsafe { list.bytes() })
}

/// Elements to be written.
///
/// # Safety
/// As for [`Listed::bytes_mut`].
unsafe fn floats_mut<'a>(list: Listed) -> FloatsMut<'a> {
    // SAFETY: as the caller promises.
    let found = FloatsMut::of_bytes(list.dtype, unsafe { list.bytes_mut() });
    found.expect("the dtype and the address were looked at")
}

/// A list of state, with its units if it is of codes.
///
/// # Safety
/// As for [`Listed::bytes_mut`].
unsafe fn state_mut<'a>(lists: &[Listed; MOST], at: usize) -> StateMut<'a> {
    // SAFETY: as the caller promises.
    let list = unsafe { lists[at].bytes_mut() };
    if lists[at].dtype != DType::U8 {
        let found = StateMut::of_bytes(lists[at].dtype, list);
        return found.expect("the dtype and the address were looked at");
    }
    let units = lists[MOST / 2 + at];
    let start = std::ptr::with_exposed_provenance_mut::<f32>(units.address);
    let units: &mut [f32] = if units.len_bytes == 0 {
        &mut []
    } else {
        // SAFETY: as the caller promises; the units are f32 at an address for them.
        unsafe { std::slice::from_raw_parts_mut(start, units.len_bytes / size_of::<f32>()) }
    };
    CodedState { codes: list, units }.into()
}

/// The lists of a parameter as slices.
///
/// # Safety
/// As for [`Listed::bytes_mut`], for all lists but the gradient, and as for [`Listed::bytes`].
unsafe fn slices_of<'a>(tensor: &Tensor, count: usize) -> MixedAdamTensors<'a> {
    // SAFETY: as the caller promises.
    unsafe {
        MixedAdamTensors {
            step: tensor.step,
            param: floats_mut(tensor.param),
            grad: floats(tensor.grad).expect("the dtype and the address were looked at"),
            moment1: state_mut(&tensor.state, 0),
            moment2: state_mut(&tensor.state, 1),
            max_moment2: (count > 2).then(|| state_mut(&tensor.state, 2)),
            copy: tensor.copy.map(|copy| floats_mut(copy)),
            before: tensor.before.as_ref().map(|before| AdamBefore {
                param: floats_mut(before.param),
                moment1: state_mut(&before.state, 0),
                moment2: state_mut(&before.state, 1),
                max_moment2: (count > 2).then(|| state_mut(&before.state, 2)),
            }),
        }
    }
}

/// Memory of a list, whether it is written, and the entry that has it, by its call and place.
struct Span {
    start: usize,
    end: usize,
    is_written: bool,
    at: [usize; 2],
}

/// Raises `RuntimeError` if a list that is written overlaps another one.
fn check_apart(groups: &[Group], calls: &[(Bound<'_, PyAny>, Bound<'_, PyList>)]) -> PyResult<()> {
    let count: usize = groups.iter().map(|group| group.tensors.len()).sum();
    let mut spans = Vec::with_capacity(count * 5);
    let tensors = groups.iter().enumerate().flat_map(|(call, group)| {
        group.tensors.iter().enumerate().map(move |(entry, tensor)| ([call, entry], tensor))
    });
    for (at, tensor) in tensors {
        let mut add = |list: Listed, is_written| {
            if list.len_bytes > 0 {
                let (start, end) = (list.address, list.address + list.len_bytes);
                spans.push(Span { start, end, is_written, at });
            }
        };
        add(tensor.param, true);
        add(tensor.grad, false);
        tensor.copy.into_iter().for_each(|list| add(list, true));
        tensor.state.into_iter().for_each(|list| add(list, true));
        if let Some(before) = &tensor.before {
            add(before.param, true);
            before.state.into_iter().for_each(|list| add(list, true));
        }
    }
    spans.sort_unstable_by_key(|span| span.start);
    // The span that reaches farthest so far, among those that are written and among all.
    let (mut written, mut any) = (None::<&Span>, None::<&Span>);
    for span in &spans {
        let before = if span.is_written { any } else { written };
        if let Some(before) = before.filter(|before| before.end > span.start) {
            let name = |[call, entry]: [usize; 2]| calls[call].1.get_item(entry)?.get_item(0);
            let (one, other) = (name(before.at)?, name(span.at)?);
            return Err(PyRuntimeError::new_err(format!(
                "`{one}` and `{other}`: expected parameters, gradients, copies and state that do \
                 not overlap in memory, found some that do; nothing was updated. Use `.clone()`"
            )));
        }
        if any.is_none_or(|any| any.end < span.end) {
            any = Some(span);
        }
        if span.is_written && written.is_none_or(|written| written.end < span.end) {
            written = Some(span);
        }
    }
    Ok(())
}
