//! A planned step over PyTorch's tensors.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::launch::{MAX_LISTS, TensorList};
use fusestep::planner::{Optimizer, Plan, State, StepReport};
use fusestep::tensor::ParamDesc;
use fusestep::{CpuBackend, DType, Shape, Tensors, Trust};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange, PyString, PyType};
use pyo3::{ffi, intern};

use crate::ahead::Ahead;
use crate::collect::{Collected, Collector, Parameter};
use crate::dlpack::Exchange;
use crate::loan::{Checked, Loan, Places, write_count};
use crate::rules::{Settings, refused};
use crate::threads;

/// Where PyTorch's tensors and the state beside them are found, and the plan of a step over them.
#[pyclass(module = "fusestep._fusestep")]
pub(crate) struct Session {
    plan: Plan,
    /// In a lock, which nobody else takes: communication streams make it fit for one thread.
    state: Mutex<State>,
    /// The rules of the groups, and of each the number that the plan gives it; `None` for groups
    /// of which nothing trains.
    rules: Vec<Optimizer>,
    rule_numbers: Vec<Option<usize>>,
    /// Whether the rates of each group are scaled, by a rule that does so.
    trusts: Vec<Option<Trust>>,
    parameters: Vec<Parameter>,
    collector: Collector,
    ahead: Ahead,
    /// Keys and values of the optimizer's `state` when it was last looked through.
    known: Vec<[Py<PyAny>; 2]>,
    borrowed: Vec<Places>,
    checked: Checked,
    report: Option<StepReport>,
    copied_gradients: u64,
    /// A step has failed half-way.
    broken: bool,
}

/// One parameter as Python describes it.
#[derive(FromPyObject)]
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) group: usize,
    /// Whether it can have a gradient.
    trains: bool,
}

#[pymethods]
impl Session {
    /// Plans a step. `parameters` are the tensors, `described` says what each is, `rules` has the
    /// settings of each group, `options` what is done around the rule, `keys` the names of roles
    /// in the optimizer's state.
    #[new]
    #[pyo3(signature = (parameters, described, rules, options, keys, library))]
    fn new(
        parameters: Vec<Py<PyAny>>,
        described: Vec<Described>,
        rules: Vec<Bound<'_, PyDict>>,
        options: &Bound<'_, PyDict>,
        keys: &Bound<'_, PyDict>,
        library: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (rules, trusts) = (parse(&rules)?, trusts(&rules)?);
        let trains = |group| described.iter().any(|p| p.trains && p.group == group);
        let (distinct, rule_numbers) = number(&rules, trains);
        let Some(&first) = distinct.first().or(rules.first()) else {
            return Err(PyValueError::new_err(
                "expected a parameter group, found none",
            ));
        };
        let mut planner = Settings(options).planner(first, Tensors::BorrowedWithState)?;
        let mut names = vec![Vec::new(); distinct.len()];
        let mut descs = Vec::new();
        let mut own: Vec<Parameter> = Vec::with_capacity(parameters.len());
        for (tensor, described) in parameters.into_iter().zip(described) {
            let mut parameter = Parameter::new(tensor, described.name, described.shape);
            if let Some(rule) = rule_numbers[described.group].filter(|_| described.trains) {
                let dtype = dtype_of(&described.dtype)?;
                parameter.member = Some(descs.len());
                let precision = Settings(options).precision(dtype)?;
                let kernel = distinct[rule].rule().kernel(dtype, precision);
                parameter.lists = shared(&own, kernel.map_err(refused)?.lists());
                parameter.keys = keys_of(&parameter, keys)?;
                let shape = Shape::new(parameter.shape.clone()).map_err(refused)?;
                let desc = ParamDesc::new(parameter.name.clone(), shape, dtype);
                let trust = trusts[described.group];
                descs.push(ParamDesc { trust, ..desc });
                names[rule].push(parameter.name.clone());
            }
            own.push(parameter);
        }
        for (names, rule) in names.into_iter().zip(&distinct).skip(1) {
            planner = planner.group(names, *rule);
        }
        let plan = planner.plan(&descs).map_err(refused)?;
        let backend = threads::backend(NonZeroUsize::MIN)?;
        let state = plan.allocate(backend.as_ref());
        let counted: PyResult<bool> = options
            .get_item("counts")?
            .map_or(Ok(false), |counts| counts.extract());
        let class = library.getattr("Tensor")?;
        Ok(Self {
            plan,
            state: Mutex::new(state.map_err(failed)?),
            borrowed: vec![None; descs.len()],
            rules,
            rule_numbers,
            trusts,
            ahead: Ahead::new(own.len()),
            parameters: own,
            collector: Collector {
                exchange: Exchange::of(class.downcast::<PyType>()?)?,
                library: library.clone().unbind(),
                counted: counted?,
            },
            known: Vec::new(),
            checked: Checked::default(),
            report: None,
            copied_gradients: 0,
            broken: false,
        })
    }

    /// Updates every parameter that has a gradient and says which, by position; `None` if tensors
    /// or settings are no longer what was planned for, and nothing was done then.
    ///
    /// `parameters` are those of all groups, `rules` their settings, `owner` is asked for state,
    /// `gradients` stand in for the parameters' own.
    #[pyo3(signature = (parameters, rules, owner, gradients, threads))]
    fn step<'py>(
        &mut self,
        py: Python<'py>,
        parameters: &Bound<'py, PyList>,
        rules: Vec<Bound<'py, PyDict>>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
        threads: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.broken || !self.is_of(parameters) || self.trusts != trusts(&rules)? {
            return Ok(None);
        }
        if !self.take_rules(parse(&rules)?) {
            return Ok(None);
        }
        self.look_through_state(owner)?;
        let state = unlocked(&mut self.state);
        let (borrowed, ahead) = (&mut self.borrowed, &mut self.ahead);
        let mut collected = Collected::new(borrowed, ahead, state.steps());
        for index in 0..self.parameters.len() {
            let parameter = &mut self.parameters[index];
            let fits =
                self.collector
                    .collect(py, parameter, (owner, index), gradients, &mut collected)?;
            if !fits {
                return Ok(None);
            }
        }
        self.copied_gradients = collected.copied;
        if collected.updated.is_empty() {
            self.report = Some(StepReport {
                without_gradient: self.borrowed.len() as u64,
                ..StepReport::default()
            });
            return Ok(Some(PyList::empty(py).into_any()));
        }
        let Collected {
            steps,
            updated,
            counts,
            kept,
            ..
        } = collected;
        if steps.iter().copied().ne(state.steps()) {
            state.set_steps(steps.iter().copied());
        }
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        let backend = threads::backend(threads)?;
        let report = self.run(py, &backend)?;
        self.report = Some(report);
        if report.skipped {
            return Ok(Some(PyList::empty(py).into_any()));
        }
        for (place, dtype, count) in counts {
            // SAFETY: the place of a tensor of one element of this dtype, found in this call and
            // kept by `kept`; the interpreter's lock is held.
            unsafe { write_count(place, dtype, count + 1.0) };
        }
        drop(kept);
        if updated.len() == self.parameters.len() {
            let all = PyRange::new(py, 0, updated.len() as isize)?;
            return Ok(Some(all.into_any()));
        }
        Ok(Some(PyList::new(py, updated)?.into_any()))
    }

    /// The plan of a step, as text.
    fn plan(&self) -> String {
        self.plan.to_string()
    }

    /// What the last step did, by name; `None` before the first.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(report) = &self.report else {
            return Ok(None);
        };
        let named = PyDict::new(py);
        named.set_item("launches", report.launches)?;
        named.set_item("elements", report.elements)?;
        named.set_item("without_gradient", report.without_gradient)?;
        named.set_item("copied_gradients", self.copied_gradients)?;
        named.set_item("grad_norm", report.grad_norm)?;
        named.set_item("update_norm", report.update_norm)?;
        named.set_item("non_finite", report.non_finite)?;
        named.set_item("skipped", report.skipped)?;
        Ok(Some(named))
    }

    /// How far each parameter moved in the last step, by name; `None` where it was not asked for.
    fn update_norms(&mut self) -> PyResult<Option<Vec<(String, f64)>>> {
        let backend = threads::backend(NonZeroUsize::MIN)?;
        let norms = unlocked(&mut self.state)
            .update_norms(backend.as_ref())
            .map_err(refused)?;
        let members = self.parameters.iter().filter(|p| p.member.is_some());
        Ok(norms.map(|norms| members.map(|p| p.name.clone()).zip(norms).collect()))
    }

    /// The loss scale and how many good and bad steps it counts; `None` where there is none.
    fn loss_scale(&mut self) -> Option<(f64, u32, u32)> {
        let scale = unlocked(&mut self.state).loss_scale()?;
        Some((scale.scale(), scale.good_steps(), scale.bad_steps()))
    }
}

impl Session {
    /// Whether these are the parameters that were planned for.
    fn is_of(&self, parameters: &Bound<'_, PyList>) -> bool {
        let own = self.parameters.iter();
        parameters.len() == own.len()
            && own.enumerate().all(|(at, own)| {
                // SAFETY: a live list that is so long; what it gives is only compared.
                own.tensor.as_ptr()
                    == unsafe { ffi::PyList_GetItem(parameters.as_ptr(), at as isize) }
            })
    }

    /// Takes the settings of the step to come; `false` if they need another plan.
    fn take_rules(&mut self, rules: Vec<Optimizer>) -> bool {
        if rules == self.rules {
            return true;
        }
        if rules.len() != self.rules.len() {
            return false;
        }
        // Groups of one number have to stay alike.
        let numbered = || rules.iter().zip(self.rule_numbers.iter().copied());
        for (rule, number) in numbered().filter(|(_, number)| number.is_some()) {
            let first = self.rule_numbers.iter().position(|&other| other == number);
            if first.is_some_and(|first| rules[first] != *rule) {
                return false;
            }
        }
        let state = unlocked(&mut self.state);
        for (rule, number) in numbered() {
            let Some(number) = number else { continue };
            if state.rules()[number] != *rule && state.set_optimizer_of(number, *rule).is_err() {
                return false;
            }
        }
        self.rules = rules;
        true
    }

    /// Looks the state of parameters up again if the optimizer's mapping has changed.
    fn look_through_state(&mut self, owner: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = owner.py();
        let state = owner.getattr(intern!(py, "state"))?;
        let state = state.downcast::<PyDict>()?;
        let same = state.len() == self.known.len() && {
            let mut known = self.known.iter();
            items_of(state, |item| {
                known
                    .next()
                    .is_some_and(|known| known.each_ref().map(Py::as_ptr) == item)
            })
        };
        if same {
            return Ok(());
        }
        for parameter in &mut self.parameters {
            let own = state.get_item(parameter.tensor.bind(py))?;
            parameter.state = match own {
                Some(own) => Some(own.downcast_into::<PyDict>()?.unbind()),
                None => None,
            };
        }
        let items = state
            .iter()
            .map(|(key, value)| [key.unbind(), value.unbind()]);
        self.known = items.collect();
        Ok(())
    }

    /// Runs the step on what has been collected, without the interpreter's lock.
    fn run(&mut self, py: Python<'_>, backend: &Arc<CpuBackend>) -> PyResult<StepReport> {
        let lists: Vec<_> = self
            .parameters
            .iter()
            .filter(|p| p.member.is_some())
            .collect();
        for (member, borrowed) in self.borrowed.iter().enumerate() {
            if borrowed.is_none() {
                unlocked(&mut self.state).set_without_gradient_at(member);
            }
        }
        // SAFETY: `Collector::collect` has found these places in this call, in tensors to which
        // the caller, `Session::step`, keeps references until it returns. Other threads that write
        // to them meanwhile race, as they would with PyTorch's own kernels, which say so.
        let loan = unsafe {
            Loan::new(&self.borrowed, backend, &mut self.checked, |member| {
                &lists[member].lists
            })
        };
        let mut loan = loan.map_err(|overlap| {
            let (one, other) = (&lists[overlap.0].name, &lists[overlap.1].name);
            PyRuntimeError::new_err(format!(
                "`{one}` and `{other}`: expected parameters, gradients and state that do not \
                 overlap in memory, found some that do; nothing was updated. Use `.clone()`"
            ))
        })?;
        let (plan, state) = (&self.plan, unlocked(&mut self.state));
        let report = py.detach(|| plan.run_borrowed(state, &mut loan));
        report.map_err(|error| {
            self.broken = true;
            failed(error)
        })
    }
}

/// Whether `is_same` holds for every key and value of a dict, whose addresses are for comparing.
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

/// These lists, which the last parameter that trains has as well, as a rule.
fn shared(own: &[Parameter], lists: &[TensorList]) -> Arc<[TensorList]> {
    let last = own.iter().rev().find(|last| last.member.is_some());
    match last {
        Some(last) if *last.lists == *lists => Arc::clone(&last.lists),
        _ => lists.into(),
    }
}

/// The state, of which the session is the only owner.
fn unlocked(state: &mut Mutex<State>) -> &mut State {
    state.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// A failure in PyTorch's kind.
fn failed(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// The rules of the groups.
pub(crate) fn parse(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Optimizer>> {
    rules.iter().map(|rule| Settings(rule).rule()).collect()
}

/// Whether the rates of each group are scaled.
pub(crate) fn trusts(rules: &[Bound<'_, PyDict>]) -> PyResult<Vec<Option<Trust>>> {
    rules.iter().map(|rule| Settings(rule).trust()).collect()
}

/// The distinct rules of groups that train, and which each group has, numbered as the planner does.
pub(crate) fn number(
    rules: &[Optimizer],
    trains: impl Fn(usize) -> bool,
) -> (Vec<Optimizer>, Vec<Option<usize>>) {
    let mut distinct: Vec<Optimizer> = Vec::new();
    let numbers = rules.iter().enumerate().map(|(group, rule)| {
        trains(group).then(|| {
            let known = distinct.iter().position(|known| known == rule);
            known.unwrap_or_else(|| {
                distinct.push(*rule);
                distinct.len() - 1
            })
        })
    });
    let numbers = numbers.collect();
    (distinct, numbers)
}

/// The names of a parameter's lists in its state; `None` for what is no state.
fn keys_of(
    parameter: &Parameter,
    keys: &Bound<'_, PyDict>,
) -> PyResult<[Option<Py<PyString>>; MAX_LISTS]> {
    let mut own: [Option<Py<PyString>>; MAX_LISTS] = Default::default();
    for (own, list) in own.iter_mut().zip(parameter.lists.iter()) {
        if list.role.is_state() {
            let key = keys.get_item(list.role.name())?.ok_or_else(|| {
                PyValueError::new_err(format!("keys: expected one for {}", list.role.name()))
            })?;
            *own = Some(PyString::intern(keys.py(), &key.extract::<String>()?).unbind());
        }
    }
    Ok(own)
}

/// A dtype by PyTorch's name or NumPy's.
pub(crate) fn dtype_of(name: &str) -> PyResult<DType> {
    match name.rsplit('.').next().unwrap_or(name) {
        "float32" => Ok(DType::F32),
        "float64" => Ok(DType::F64),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "expected float32, float64, float16 or bfloat16, found {other}"
        ))),
    }
}
