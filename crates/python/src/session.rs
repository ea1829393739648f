//! A planned step over PyTorch's tensors.

mod ran;
mod stepping;

use std::sync::{Mutex, PoisonError};

use fusestep::launch::SquareSum;
use fusestep::planner::State;
use fusestep::tensor::ParamDesc;
use fusestep::{Borrowed, Report, Shape, StepOptions};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange};
use pyo3::{ffi, intern};

use self::ran::{Around, Ran, Recorded};
use crate::ahead::Ahead;
use crate::collect::Collector;
use crate::cuda::{ContextBefore, Tables};
use crate::described::{Described, dtype_of};
use crate::device::{Device, InContext};
use crate::errors::{refused, started};
use crate::group_rules::{GroupRules, Taken};
use crate::handle::{handles, look_at};
use crate::loan::{Checked, Member, Places, write_count};
use crate::parameter::{Form, Mapping, Parameter, overlapping};
use crate::pending::Pending;
use crate::private::Private;
use crate::reported::named;
use crate::rules::{Settings, number, own_rules, parse, rates, trusts};
use crate::settings::of_one_process;
use crate::stream::Asked;

/// Tensors of PyTorch, their state, and the plan of a step over them.
#[pyclass(module = "fusestep._fusestep")]
pub(crate) struct Session {
    /// Device of all tensors.
    device: Device,
    /// Plan and counts of steps, in a lock that no other code takes. The lock is needed because
    /// communication streams make a state usable by one thread only.
    steps: Mutex<Steps>,
    rules: GroupRules,
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
    report: Option<Report>,
    /// The step that is enqueued on a device, until its outcome is known.
    pending: Option<Pending>,
    /// Tables of the launches on a device, in a lock for the same reason.
    tables: Mutex<InContext<Tables>>,
    /// The step that a framework has recorded, once it has.
    recorded: Option<Recorded>,
    /// Whether a step has failed half-way, or settings were taken in part.
    broken: bool,
    /// Whether the last call of `step` has updated parameters, whatever it raised afterwards.
    has_updated: bool,
}

/// Plan and counts of steps, whose memory may be a device's.
type Steps = InContext<fusestep::Session<'static>>;

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
        let (rates, trusts) = (rates(&rules)?, trusts(&rules)?);
        let rules = parse(&rules)?;
        let trains = |group| described.iter().any(|p| p.trains && p.group == group);
        let (distinct, rule_numbers) = number(&rules, &rates, trains);
        let Some(&first) = distinct.first().or(rules.first()) else {
            return Err(PyValueError::new_err("expected a parameter group, found none"));
        };
        let step = settings_of(Settings(options).options(first)?, &described)?;
        let (mut names, mut descs) = (vec![Vec::new(); distinct.len()], Vec::new());
        let (mut own, mut sizes) = (Vec::<Parameter>::new(), vec![0; rules.len()]);
        for (tensor, described) in parameters.into_iter().zip(described) {
            sizes[described.group] += 1;
            let Described { name, shape, strides, .. } = described;
            let form = Form::of(&name, shape, strides)?;
            let mut parameter = Parameter::new(tensor, name, form, own.last());
            if let Some(rule) = rule_numbers[described.group].filter(|_| described.trains) {
                let dtype = dtype_of(&described.dtype)?;
                let shape = Shape::new(parameter.shape.to_vec()).map_err(refused)?;
                let desc = ParamDesc::new(parameter.name.clone(), shape, dtype);
                let kernel = distinct[rule].rule().kernel(dtype, step.precision_for(&desc));
                let kernel = kernel.map_err(refused)?;
                parameter.train(descs.len(), kernel.lists(), keys, own.last())?;
                let trust = trusts[described.group];
                descs.push(ParamDesc { trust, ..desc });
                names[rule].push(parameter.name.clone());
            }
            own.push(parameter);
        }
        let step = StepOptions { groups: own_rules(names, &distinct), ..step };
        let _before = ContextBefore::remember();
        let device = Device::of(library)?;
        let (backend, state) = (Box::new(device.backend()?), Borrowed::ParamsAndState);
        let steps = fusestep::Session::borrowing(&step, &descs, backend, state).map_err(started)?;
        let counted: PyResult<bool> =
            options.get_item("counts")?.map_or(Ok(false), |counts| counts.extract());
        let members: Vec<Member> = own.iter().filter_map(Parameter::borrowed).collect();
        Ok(Self {
            steps: Mutex::new(InContext::new(steps)),
            places: Places::new(&members),
            private: Private::new(members.len()),
            members,
            rules: GroupRules { rules, numbers: rule_numbers, trusts, rates },
            ahead: Ahead::new(own.len()),
            collector: Collector {
                handles: handles(library, &mut own)?,
                library: library.clone().unbind(),
                memory: device.name_of(library)?,
                counted: counted?,
            },
            device,
            parameters: own,
            sizes,
            known: Mapping::default(),
            checked: Checked::default(),
            report: None,
            pending: None,
            tables: Mutex::new(InContext::new(Tables::default())),
            recorded: None,
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
        // A failure has left the session broken, which the next step says.
        let _ = self.conclude(py);
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
    /// are counted here until [`Session::write_steps`]. On a device `asked` says what else the step
    /// is to heed. `whole` has the sums of squares over gradients of which these are a part
    /// ([`Session::squares`]), by which the step decides.
    #[pyo3(
        signature = (
            parameters, rules, owner, gradients, threads, private=false, written=None, asked=None,
            whole=None
        )
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
        asked: Option<Asked>,
        whole: Option<Vec<(f64, u64)>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.has_updated = false;
        if !self.begin(py, &parameters, rules.as_deref(), owner, private)? {
            return Ok(None);
        }
        let Some(found) = self.collect(py, owner, gradients)? else {
            return Ok(None);
        };
        self.known.has_grown |= found.made_state;
        if found.updated.is_empty() && whole.is_none() {
            self.report = Some(self.of_no_gradients());
            return Ok(Some(PyList::empty(py).into_any()));
        }
        let state = state_of(&mut self.steps);
        if found.steps.iter().copied().ne(state.steps()) {
            state.set_steps(found.steps.iter().copied());
        }
        unlocked(&mut self.steps).count_copied(found.copied);
        if let Some(whole) = whole {
            let square = |(sum, non_finite)| SquareSum { sum, non_finite };
            state_of(&mut self.steps).give_squares(whole.into_iter().map(square).collect());
        }
        let share = owner.getattr_opt(intern!(py, "share"))?.filter(|share| !share.is_none());
        let share = share.map(Bound::unbind);
        let around = Around { share: share.as_ref(), written: written.as_ref() };
        let asked = asked.unwrap_or_default();
        let (report, told) = match self.run(py, threads, asked, around, &found)? {
            Ran::Taken(report, told) => (report, told),
            Ran::Recorded(told) => {
                let report = self.report.take().unwrap_or_else(|| self.of_no_gradients());
                self.report = Some(report);
                told?;
                return Ok(Some(PyList::new(py, found.updated)?.into_any()));
            }
        };
        self.report = unlocked(&mut self.steps).report().copied();
        if report.is_some_and(|report| report.skipped) {
            return Ok(Some(PyList::empty(py).into_any()));
        }
        self.pending = report.is_none().then(|| Pending::of(&found, &self.parameters));
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

    /// Looks at the tensors of a step without taking it. Raises what the step would raise before it
    /// updates anything; `false` if tensors or settings are no longer as planned. `owner` makes
    /// missing state.
    fn looks<'py>(
        &mut self,
        py: Python<'py>,
        parameters: Vec<Bound<'py, PyList>>,
        rules: Vec<Bound<'py, PyDict>>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
    ) -> PyResult<bool> {
        self.conclude(py)?;
        if self.broken || !self.is_of(&parameters) || !self.takes(&rules)? {
            return Ok(false);
        }
        self.private.forget();
        self.known.look_through(owner, &mut self.parameters)?;
        let Some(found) = self.collect(py, owner, gradients)? else {
            return Ok(false);
        };
        self.known.has_grown |= found.made_state;
        let checked = self.checked.check(&self.places, &self.members);
        checked.map(|()| true).map_err(|overlap| overlapping(&self.parameters, overlap))
    }

    /// Reads the gradients of a step, whose tensors [`Session::looks`] has looked at. Returns the
    /// sum of squares over each parameter's, and its elements that are not finite; waits for a
    /// device. `None` if tensors are no longer as planned.
    fn squares<'py>(
        &mut self,
        py: Python<'py>,
        parameters: Vec<Bound<'py, PyList>>,
        owner: &Bound<'py, PyAny>,
        gradients: Option<&Bound<'py, PyList>>,
        threads: usize,
        asked: Option<Asked>,
    ) -> PyResult<Option<Vec<(f64, u64)>>> {
        if self.broken || !self.is_of(&parameters) {
            return Ok(None);
        }
        let Some(_found) = self.collect(py, owner, gradients)? else {
            return Ok(None);
        };
        self.squares_of(py, threads, asked.unwrap_or_default()).map(Some)
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
    fn write_steps(&mut self, py: Python<'_>) -> PyResult<()> {
        self.conclude(py)?;
        let steps: Vec<u64> = state_of(&mut self.steps).steps().collect();
        for parameter in &self.parameters {
            let known = parameter.member.filter(|&member| self.private.has(member));
            if let Some(member) = known {
                self.collector.write_steps(py, parameter, steps[member]);
            }
        }
        self.private.forget();
        Ok(())
    }

    /// Whether a step is enqueued on a device, whose outcome nobody has asked for.
    fn is_enqueued(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether a step was recorded, whose replays go on from this session's memory.
    fn is_recorded(&self) -> bool {
        self.recorded.is_some()
    }

    /// Bytes that were copied to a device for tables of launches until now.
    fn table_bytes(&mut self) -> u64 {
        unlocked(&mut self.tables).copied_bytes()
    }

    /// The plan of a step, as text.
    fn plan(&mut self) -> String {
        unlocked(&mut self.steps).plan().to_string()
    }

    /// The report of the last step, by name; `None` before the first step.
    fn report<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.conclude(py)?;
        self.report.as_ref().map(|report| named(py, report)).transpose()
    }

    /// Measures the seconds of every step's parts from here on.
    fn time_steps(&mut self) {
        unlocked(&mut self.steps).time_steps();
    }

    /// The distance that each parameter moved in the last step, by name; `None` if the options do
    /// not ask for it.
    fn update_norms(&mut self) -> PyResult<Option<Vec<(String, f64)>>> {
        let backend = self.device.backend()?;
        let norms = state_of(&mut self.steps).update_norms(backend.as_ref()).map_err(refused)?;
        let members = self.parameters.iter().filter(|p| p.member.is_some());
        Ok(norms.map(|norms| members.map(|p| p.name.clone()).zip(norms).collect()))
    }

    /// The loss scale, and its numbers of good and bad steps; `None` without a loss scale.
    fn loss_scale(&mut self, py: Python<'_>) -> PyResult<Option<(f64, u32, u32)>> {
        self.conclude(py)?;
        let scale = state_of(&mut self.steps).loss_scale();
        Ok(scale.map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps())))
    }
}

impl Session {
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
        let taken = self.rules.take(rules, state_of(&mut self.steps))?;
        self.broken |= taken == Taken::InPart;
        Ok(taken == Taken::All)
    }
}

/// The settings of one process. Where parameters have gradients in f32, others of their dtype have
/// theirs brought to f32, which changes no value.
fn settings_of(step: StepOptions, described: &[Described]) -> PyResult<StepOptions> {
    let step = of_one_process(step)?;
    let mut wide = described.iter().filter(|own| own.trains && own.wide);
    wide.try_fold(step, |step, own| Ok(step.with_f32_gradients(dtype_of(&own.dtype)?)))
}

/// Content of a lock, for its only owner.
fn unlocked<T>(lock: &mut Mutex<T>) -> &mut T {
    lock.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// The counts of steps.
fn state_of(steps: &mut Mutex<Steps>) -> &mut State {
    unlocked(steps).state_mut()
}
