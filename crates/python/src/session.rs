//! A planned step over PyTorch's tensors.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::planner::{Optimizer, State, StepReport};
use fusestep::tensor::ParamDesc;
use fusestep::{Borrowed, CpuBackend, DType, Shape, SharedBackend, StepOptions, Trust};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange};
use pyo3::{ffi, intern};

use crate::ahead::Ahead;
use crate::collect::{Collected, Collector, Found, Gradients};
use crate::errors::{failed, refused, started};
use crate::getter::Getter;
use crate::handle::Handles;
use crate::loan::{Checked, Loan, Member, Places, write_count};
use crate::openmp;
use crate::parameter::{Mapping, Parameter};
use crate::private::Private;
use crate::rules::{Settings, number, own_rules, parse, trusts};
use crate::settings::{of_one_process, precision};
use crate::threads;
use crate::written::Written;

/// Tensors of PyTorch, their state, and the plan of a step over them.
#[pyclass(module = "fusestep._fusestep")]
pub(crate) struct Session {
    /// Plan and counts of steps, in a lock that no other code takes. The lock is needed because
    /// communication streams make a state usable by one thread only.
    steps: Mutex<fusestep::Session<'static>>,
    /// Rules of the groups, and the plan's number of each rule; `None` for a group without a
    /// parameter that trains.
    rules: Vec<Optimizer>,
    rule_numbers: Vec<Option<usize>>,
    /// Whether the trust ratio scales the rates of each group, under a rule that has one.
    trusts: Vec<Option<Trust>>,
    parameters: Vec<Parameter>,
    /// Number of parameters of each group, which tells the group of each parameter.
    sizes: Vec<usize>,
    collector: Collector,
    ahead: Ahead,
    known: Mapping,
    members: Vec<Member>,
    places: Places,
    private: Private,
    checked: Checked,
    report: Option<StepReport>,
    copied_gradients: u64,
    /// Whether a step has failed half-way, or settings were taken in part.
    broken: bool,
    /// Whether the last call of `step` has updated parameters, whatever it raised afterwards.
    has_updated: bool,
}

/// A parameter as Python describes it.
#[derive(FromPyObject)]
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) group: usize,
    /// Whether the parameter can have a gradient.
    trains: bool,
}

#[pymethods]
impl Session {
    /// Plans a step. `parameters` are the tensors, and `described` describes each of them. `rules`
    /// has the settings of each group, and `options` the passes around the rule. `keys` has the
    /// names of roles in the optimizer's state.
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
        let step = of_one_process(Settings(options).options(first)?)?;
        let mut names = vec![Vec::new(); distinct.len()];
        let mut descs = Vec::new();
        let mut own: Vec<Parameter> = Vec::with_capacity(parameters.len());
        let mut sizes = vec![0; rules.len()];
        for (tensor, described) in parameters.into_iter().zip(described) {
            let (name, shape) = (described.name, described.shape);
            sizes[described.group] += 1;
            let mut parameter = Parameter::new(tensor, name, shape, own.last());
            if let Some(rule) = rule_numbers[described.group].filter(|_| described.trains) {
                let dtype = dtype_of(&described.dtype)?;
                let kernel = distinct[rule].rule().kernel(dtype, precision(&step, dtype));
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
        let step = StepOptions { groups: own_rules(names, &distinct), ..step };
        let backend: SharedBackend = threads::backend(NonZeroUsize::MIN)?;
        let (device, state) = (Box::new(backend), Borrowed::ParamsAndState);
        let steps = fusestep::Session::borrowing(&step, &descs, device, state).map_err(started)?;
        let counted: PyResult<bool> =
            options.get_item("counts")?.map_or(Ok(false), |counts| counts.extract());
        let members: Vec<Member> = own.iter().filter_map(Parameter::borrowed).collect();
        Ok(Self {
            steps: Mutex::new(steps),
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
            sizes,
            known: Mapping::default(),
            checked: Checked::default(),
            report: None,
            copied_gradients: 0,
            broken: false,
            has_updated: false,
        })
    }

    /// Whether these tensors of each group are the planned ones.
    fn fits(&self, parameters: Vec<Bound<'_, PyList>>) -> bool {
        let lists = parameters.iter().enumerate();
        let mut sizes = lists.map(|(group, list)| (list.len(), self.sizes.get(group)));
        sizes.all(|(found, own)| found == own.copied().unwrap_or(0)) && self.is_of(&parameters)
    }

    /// Takes these tensors for all later steps; each must be like the planned one in its place.
    fn bind(&mut self, py: Python<'_>, parameters: Vec<Py<PyAny>>) -> PyResult<()> {
        let (expected, found) = (self.parameters.len(), parameters.len());
        if expected != found {
            let text = format!("parameters: expected {expected} tensors, found {found}");
            return Err(PyValueError::new_err(text));
        }
        self.release(py);
        for (own, tensor) in self.parameters.iter_mut().zip(parameters) {
            own.tensor = tensor;
        }
        match &mut self.collector.handles {
            Some(handles) => look_at(py, handles, &mut self.parameters),
            None => Ok(()),
        }
    }

    /// Gives back all tensors and forgets what is known of them.
    fn release(&mut self, py: Python<'_>) {
        self.parameters.iter_mut().for_each(|own| own.release(py));
        self.known = Mapping::default();
        self.private.forget();
        self.checked = Checked::default();
        self.ahead = Ahead::new(self.parameters.len());
    }

    /// Updates every parameter that has a gradient, and returns their positions. `None` if tensors
    /// or settings are no longer as planned; then nothing was done.
    ///
    /// `parameters` has a list for each group. `rules` are the groups' settings, if they have
    /// changed since the last step. `owner` makes missing state. `gradients` replace the
    /// parameters' own, and `written` is called with updated parameters. While the state is
    /// `private`, only `owner` can have seen it. Then its tensors stay where they are, and steps
    /// are counted here until [`Session::write_steps`].
    #[pyo3(
        signature = (parameters, rules, owner, gradients, threads, private=false, written=None)
    )]
    #[expect(clippy::too_many_arguments, reason = "one call, in place of objects at each step")]
    fn step<'py>(
        &mut self,
        py: Python<'py>,
        parameters: Vec<Bound<'py, PyList>>,
        rules: Option<Vec<Bound<'py, PyDict>>>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
        threads: usize,
        private: bool,
        written: Option<Py<PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.has_updated = false;
        if self.broken || !self.is_of(&parameters) {
            return Ok(None);
        }
        if let Some(rules) = rules
            && !self.takes(&rules)?
        {
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
        let state = state_of(&mut self.steps);
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
        // Whatever was raised meanwhile, such as a Ctrl-C, the step is done and counted.
        told?;
        let updated = found.updated;
        Ok(Some(if updated.len() == self.parameters.len() {
            PyRange::new(py, 0, updated.len() as isize)?.into_any()
        } else {
            PyList::new(py, updated)?.into_any()
        }))
    }

    /// Whether the last step has updated parameters, even if it raised an error.
    fn has_updated(&self) -> bool {
        self.has_updated
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.collector.library)?;
        self.known.traverse(&visit)?;
        let mut parameters = self.parameters.iter();
        parameters.try_for_each(|parameter| parameter.traverse(&visit))
    }

    /// Gives back objects that may refer to the optimizer; no more steps are possible.
    fn __clear__(&mut self) {
        self.broken = true;
        self.parameters = Vec::new();
        self.known = Mapping::default();
    }

    /// Writes the steps that were counted here to the tensors that count them, since private state
    /// stopped being private. The next step reads these tensors, as others may have counted on.
    fn write_steps(&mut self, py: Python<'_>) {
        let steps: Vec<u64> = state_of(&mut self.steps).steps().collect();
        for parameter in &self.parameters {
            let known = parameter.member.filter(|&member| self.private.has(member));
            if let Some(member) = known {
                self.collector.write_steps(py, parameter, steps[member]);
            }
        }
        self.private.forget();
    }

    /// The plan of a step, as text.
    fn plan(&mut self) -> String {
        unlocked(&mut self.steps).plan().to_string()
    }

    /// The report of the last step, by name; `None` before the first step.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(report) = &self.report else {
            return Ok(None);
        };
        let named = PyDict::new(py);
        named.set_item(intern!(py, "launches"), report.launches)?;
        named.set_item(intern!(py, "elements"), report.elements)?;
        named.set_item(intern!(py, "without_gradient"), report.without_gradient)?;
        named.set_item(intern!(py, "copied_gradients"), self.copied_gradients)?;
        named.set_item(intern!(py, "grad_norm"), report.grad_norm)?;
        named.set_item(intern!(py, "update_norm"), report.update_norm)?;
        named.set_item(intern!(py, "non_finite"), report.non_finite)?;
        named.set_item(intern!(py, "skipped"), report.skipped)?;
        Ok(Some(named))
    }

    /// The distance that each parameter moved in the last step, by name; `None` if the options do
    /// not ask for it.
    fn update_norms(&mut self) -> PyResult<Option<Vec<(String, f64)>>> {
        let backend = threads::backend(NonZeroUsize::MIN)?;
        let norms = state_of(&mut self.steps).update_norms(backend.as_ref()).map_err(refused)?;
        let members = self.parameters.iter().filter(|p| p.member.is_some());
        Ok(norms.map(|norms| members.map(|p| p.name.clone()).zip(norms).collect()))
    }

    /// The loss scale, and its numbers of good and bad steps; `None` without a loss scale.
    fn loss_scale(&mut self) -> Option<(f64, u32, u32)> {
        let scale = state_of(&mut self.steps).loss_scale()?;
        Some((scale.scale(), scale.good_steps(), scale.bad_steps()))
    }
}

impl Session {
    /// Finds the tensors of all parameters; `None` if one is no longer as planned.
    fn collect<'py>(
        &mut self,
        py: Python<'py>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Option<Found<'py>>> {
        let steps = state_of(&mut self.steps).steps();
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

    /// Whether these are the planned parameters.
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

    /// Takes the settings of the next step; `false` if they need another plan.
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
        // Groups that share a number must keep the same settings.
        let numbered = || rules.iter().zip(self.rule_numbers.iter().copied());
        for (rule, number) in numbered().filter(|(_, number)| number.is_some()) {
            let first = self.rule_numbers.iter().position(|&other| other == number);
            if first.is_some_and(|first| rules[first] != *rule) {
                return false;
            }
        }
        let state = state_of(&mut self.steps);
        for (rule, number) in numbered() {
            let Some(number) = number else { continue };
            if state.rules()[number] != *rule && state.set_optimizer_of(number, *rule).is_err() {
                // Rules before this one may have been taken already.
                self.broken = true;
                return false;
            }
        }
        self.rules = rules;
        true
    }

    /// Runs the step on the collected tensors, without the interpreter's lock. Then reports the
    /// written parameters, unless the step was skipped. The inner result is the error that this
    /// report raised.
    fn run(
        &mut self,
        py: Python<'_>,
        backend: &Arc<CpuBackend>,
        (written, updated): (Option<&Py<PyAny>>, &[usize]),
    ) -> PyResult<(StepReport, PyResult<()>)> {
        let without = self.places.has_gradient().iter().enumerate();
        for (member, _) in without.filter(|(_, has)| !**has) {
            state_of(&mut self.steps).set_without_gradient_at(member);
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
        let steps = unlocked(&mut self.steps);
        let written = written.map(|call| Written {
            call,
            direct: self.collector.handles.as_ref().and_then(Handles::direct),
            parameters: &self.parameters,
            updated,
        });
        let report = py.detach(|| steps.step_borrowed(&mut loan)).map_err(|error| {
            self.broken = true;
            failed(error)
        })?;
        let written = written.filter(|_| !report.skipped);
        Ok((report, written.map_or(Ok(()), |written| written.tell(py))))
    }
}

/// Content of a lock, for its only owner.
fn unlocked<T>(lock: &mut Mutex<T>) -> &mut T {
    lock.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// The counts of steps.
fn state_of<'a>(steps: &'a mut Mutex<fusestep::Session<'static>>) -> &'a mut State {
    unlocked(steps).state_mut()
}

/// The access to the library's tensors, prepared for these parameters.
fn handles(library: &Bound<'_, PyAny>, parameters: &mut [Parameter]) -> PyResult<Option<Handles>> {
    let file: Option<String> = library.getattr("file")?.extract()?;
    let Some(file) = file else {
        return Ok(None);
    };
    openmp::look_in(&file);
    let mut handles = Handles::of(library, &file)?;
    if let Some(handles) = &mut handles {
        look_at(library.py(), handles, parameters)?;
    }
    Ok(handles)
}

/// Prepares the access to the tensors of these parameters.
fn look_at(py: Python<'_>, handles: &mut Handles, parameters: &mut [Parameter]) -> PyResult<()> {
    for own in parameters {
        let tensor = own.tensor.bind(py);
        handles.expect(tensor);
        if let Some(direct) = handles.direct() {
            own.known = direct.countable(tensor)?;
        }
    }
    Ok(())
}

/// The dtype of a name of PyTorch's or NumPy's.
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
