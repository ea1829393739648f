//! A planned step over PyTorch's tensors.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::planner::{Optimizer, Plan, State, StepReport};
use fusestep::tensor::ParamDesc;
use fusestep::{CpuBackend, DType, Shape, Tensors, Trust};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange};
use pyo3::{ffi, intern};

use crate::ahead::Ahead;
use crate::collect::{Collected, Collector, Found, Gradients};
use crate::getter::Getter;
use crate::handle::Handles;
use crate::loan::{Checked, Loan, Member, Places, write_count};
use crate::openmp;
use crate::parameter::{Mapping, Parameter};
use crate::private::Private;
use crate::rules::{Settings, number, parse, refused, trusts};
use crate::threads;
use crate::written::Written;

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
    known: Mapping,
    members: Vec<Member>,
    places: Places,
    private: Private,
    checked: Checked,
    report: Option<StepReport>,
    copied_gradients: u64,
    /// A step has failed half-way.
    broken: bool,
    /// The last call of `step` has updated parameters, whatever it raised then.
    has_updated: bool,
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
            return Err(PyValueError::new_err("expected a parameter group, found none"));
        };
        let mut planner = Settings(options).planner(first, Tensors::BorrowedWithState)?;
        let mut names = vec![Vec::new(); distinct.len()];
        let mut descs = Vec::new();
        let mut own: Vec<Parameter> = Vec::with_capacity(parameters.len());
        for (tensor, described) in parameters.into_iter().zip(described) {
            let (name, shape) = (described.name, described.shape);
            let mut parameter = Parameter::new(tensor, name, shape, own.last());
            if let Some(rule) = rule_numbers[described.group].filter(|_| described.trains) {
                let dtype = dtype_of(&described.dtype)?;
                let precision = Settings(options).precision(dtype)?;
                let kernel = distinct[rule].rule().kernel(dtype, precision);
                let kernel = kernel.map_err(refused)?;
                parameter.train(descs.len(), kernel.lists(), keys, own.last())?;
                let shape = Shape::new(parameter.shape.to_vec()).map_err(refused)?;
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
        let state = plan.allocate(threads::backend(NonZeroUsize::MIN)?.as_ref());
        let counted: PyResult<bool> =
            options.get_item("counts")?.map_or(Ok(false), |counts| counts.extract());
        let members: Vec<Member> = own.iter().filter_map(Parameter::borrowed).collect();
        Ok(Self {
            plan,
            state: Mutex::new(state.map_err(failed)?),
            places: Places::new(&members),
            private: Private::new(members.len()),
            members,
            rules,
            rule_numbers,
            trusts,
            ahead: Ahead::new(own.len()),
            collector: Collector {
                handles: handles(library, &mut own)?,
                library: library.clone().unbind(),
                counted: counted?,
            },
            parameters: own,
            known: Mapping::default(),
            checked: Checked::default(),
            report: None,
            copied_gradients: 0,
            broken: false,
            has_updated: false,
        })
    }

    /// Updates every parameter that has a gradient and says which, by position; `None` if tensors
    /// or settings are no longer what was planned for, and nothing was done then.
    ///
    /// `parameters` are those of all groups, a list each, `rules` the groups' settings, `owner` is
    /// asked for state, `gradients` stand in for the parameters' own, `written` is called with
    /// parameters that have been or are being updated. While the state is `private`, nobody but
    /// `owner` can have seen it: what was found in it stays where it is, and its steps are counted
    /// here until [`Session::write_steps`].
    #[pyo3(
        signature = (parameters, rules, owner, gradients, threads, private=false, written=None)
    )]
    #[expect(clippy::too_many_arguments, reason = "one call, in place of objects at each step")]
    fn step<'py>(
        &mut self,
        py: Python<'py>,
        parameters: Vec<Bound<'py, PyList>>,
        rules: Vec<Bound<'py, PyDict>>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
        threads: usize,
        private: bool,
        written: Option<Py<PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.has_updated = false;
        if self.broken || !self.is_of(&parameters) || !self.takes(&rules)? {
            return Ok(None);
        }
        if !private {
            self.private.forget();
        }
        if !private || self.known.is_empty() {
            self.known.look_through(owner, &mut self.parameters)?;
        }
        let Some(found) = self.collect(py, owner, gradients)? else {
            return Ok(None);
        };
        self.known.has_grown |= found.made_state;
        self.copied_gradients = found.copied;
        if found.updated.is_empty() {
            self.report = Some(StepReport {
                without_gradient: self.members.len() as u64,
                ..StepReport::default()
            });
            return Ok(Some(PyList::empty(py).into_any()));
        }
        let state = unlocked(&mut self.state);
        if found.steps.iter().copied().ne(state.steps()) {
            state.set_steps(found.steps.iter().copied());
        }
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        let backend = threads::backend(threads)?;
        let (report, told) = self.run(py, &backend, (written.as_ref(), &found.updated))?;
        self.report = Some(report);
        if report.skipped {
            return Ok(Some(PyList::empty(py).into_any()));
        }
        self.has_updated = true;
        for (place, dtype, count) in found.counts {
            // SAFETY: the place of a tensor of one element of this dtype, found in this call and
            // kept by `self.parameters`; the interpreter's lock is held.
            unsafe { write_count(place, dtype, count + 1.0) };
        }
        if private {
            self.private.remember(&found.looked);
        }
        // Whatever was raised meanwhile, a Ctrl-C for one, the step is taken and counted.
        told?;
        let updated = found.updated;
        Ok(Some(if updated.len() == self.parameters.len() {
            PyRange::new(py, 0, updated.len() as isize)?.into_any()
        } else {
            PyList::new(py, updated)?.into_any()
        }))
    }

    /// Whether the last step has updated parameters, even if it raised something.
    fn has_updated(&self) -> bool {
        self.has_updated
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.collector.library)?;
        self.known.traverse(&visit)?;
        let mut parameters = self.parameters.iter();
        parameters.try_for_each(|parameter| parameter.traverse(&visit))
    }

    /// Gives back what may refer to the optimizer; there are no steps any more.
    fn __clear__(&mut self) {
        self.broken = true;
        self.parameters = Vec::new();
        self.known = Mapping::default();
    }

    /// Writes what was counted here while the state was private to the tensors that count steps;
    /// others may count on, so the next step looks.
    fn write_steps(&mut self, py: Python<'_>) {
        let steps: Vec<u64> = unlocked(&mut self.state).steps().collect();
        for parameter in &self.parameters {
            let known = parameter.member.filter(|&member| self.private.has(member));
            if let Some(member) = known {
                self.collector.write_steps(py, parameter, steps[member]);
            }
        }
        self.private.forget();
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
        let norms = unlocked(&mut self.state).update_norms(backend.as_ref()).map_err(refused)?;
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
    /// Finds the tensors of all parameters; `None` if one is not what was planned for.
    fn collect<'py>(
        &mut self,
        py: Python<'py>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Option<Found<'py>>> {
        let steps = unlocked(&mut self.state).steps();
        let (places, ahead) = (&mut self.places, &mut self.ahead);
        let mut collected = Collected::new(places, ahead, &self.private, steps);
        let gradients = match (gradients, self.parameters.first()) {
            (Some(gradients), _) => Gradients::Given(gradients),
            (None, None) => return Ok(Some(collected.found)),
            (None, Some(first)) => {
                let direct = self.collector.handles.as_ref().and_then(Handles::direct);
                Gradients::Own(Getter::of(first.tensor.bind(py), intern!(py, "grad"), direct))
            }
        };
        for (index, parameter) in self.parameters.iter_mut().enumerate() {
            let owner = (owner, index);
            let collector = &self.collector;
            if !collector.collect(py, parameter, owner, &gradients, &mut collected)? {
                return Ok(None);
            }
        }
        Ok(Some(collected.found))
    }

    /// Whether these are the parameters that were planned for.
    fn is_of(&self, parameters: &[Bound<'_, PyList>]) -> bool {
        let mut own = self.parameters.iter();
        let count: usize = parameters.iter().map(|list| list.len()).sum();
        count == own.len()
            && parameters.iter().all(|list| {
                own.by_ref().take(list.len()).enumerate().all(|(at, own)| {
                    // SAFETY: a live list that is so long; what it gives is only compared.
                    own.tensor.as_ptr()
                        == unsafe { ffi::PyList_GetItem(list.as_ptr(), at as isize) }
                })
            })
    }

    /// Takes the settings of the step to come; `false` if they need another plan.
    fn takes(&mut self, rules: &[Bound<'_, PyDict>]) -> PyResult<bool> {
        Ok(self.trusts == trusts(rules)? && self.take_rules(parse(rules)?))
    }

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

    /// Runs the step on what has been collected, without the interpreter's lock, and tells who has
    /// been written, unless the step came to nothing. Returns what telling raised beside what was
    /// done.
    fn run(
        &mut self,
        py: Python<'_>,
        backend: &Arc<CpuBackend>,
        (written, updated): (Option<&Py<PyAny>>, &[usize]),
    ) -> PyResult<(StepReport, PyResult<()>)> {
        let without = self.places.has_gradient().iter().enumerate();
        for (member, _) in without.filter(|(_, has)| !**has) {
            unlocked(&mut self.state).set_without_gradient_at(member);
        }
        // SAFETY: `Collector::collect` has found these places in this call, in tensors to which
        // the caller, `Session::step`, keeps references until it returns, or in an earlier one, in
        // state to which the optimizer keeps references and nobody else has any. Other threads
        // that write to them meanwhile race, as they would with PyTorch's own kernels, which say
        // so.
        let loan = unsafe { Loan::new(&self.places, &self.members, backend, &mut self.checked) };
        let mut loan = loan.map_err(|overlap| {
            let name_of = |member| {
                let mut all = self.parameters.iter();
                let own = all.find(|parameter| parameter.member == Some(member));
                own.map_or("", |own| own.name.as_str())
            };
            let (one, other) = (name_of(overlap.0), name_of(overlap.1));
            PyRuntimeError::new_err(format!(
                "`{one}` and `{other}`: expected parameters, gradients and state that do not \
                 overlap in memory, found some that do; nothing was updated. Use `.clone()`"
            ))
        })?;
        let (plan, state) = (&self.plan, unlocked(&mut self.state));
        let written = written.map(|call| Written {
            call,
            direct: self.collector.handles.as_ref().and_then(Handles::direct),
            parameters: &self.parameters,
            updated,
        });
        let report = py.detach(|| plan.run_borrowed(state, &mut loan)).map_err(|error| {
            self.broken = true;
            failed(error)
        })?;
        let written = written.filter(|_| !report.skipped);
        Ok((report, written.map_or(Ok(()), |written| written.tell(py))))
    }
}

/// The state, of which the session is the only owner.
fn unlocked(state: &mut Mutex<State>) -> &mut State {
    state.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// How the library's tensors are looked at, those of the parameters at once.
fn handles(library: &Bound<'_, PyAny>, parameters: &mut [Parameter]) -> PyResult<Option<Handles>> {
    let file: Option<String> = library.getattr("file")?.extract()?;
    let Some(file) = file else {
        return Ok(None);
    };
    openmp::look_in(&file);
    let mut handles = Handles::of(library, &file)?;
    if let Some(handles) = &mut handles {
        for own in parameters {
            let tensor = own.tensor.bind(library.py());
            handles.expect(tensor);
            if let Some(direct) = handles.direct() {
                own.known = direct.countable(tensor)?;
            }
        }
    }
    Ok(handles)
}

/// A failure in PyTorch's kind.
fn failed(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
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
