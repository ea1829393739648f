//! One step: the only loop over a plan's stages.

use fusestep_launch::{Backend, BackendError, Launch, LaunchReport, Reduce, SetValues};

use crate::comms::Comms;
use crate::in_backward::check_between_steps;
use crate::{Plan, PlanError, Stage, State, StepReport};

impl Plan {
    /// Runs one step on a state that keeps parameters and gradients.
    ///
    /// Allocates nothing while the same tensors take part as in the step before.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::NoSuchList`] if the plan's tensors are borrowed;
    /// nothing has been written then. [`PlanError::Backend`] if the device fails half-way; the
    /// state refuses further steps then ([`PlanError::Poisoned`]).
    /// # Cost
    /// [`Plan::traffic_bytes`] of memory traffic in [`Plan::launches`] launches.
    pub fn run(&self, state: &mut State, backend: &dyn Backend) -> Result<StepReport, PlanError> {
        if self.tensors.are_borrowed() {
            return Err(PlanError::NoSuchList {
                role: fusestep_tensor::Role::Param,
                name: self
                    .params
                    .first()
                    .map_or(String::new(), |p| p.name.clone()),
                hint: "its tensors are borrowed; use `run_borrowed`",
            });
        }
        self.run_stages(state, Executor::Backend(backend))
    }

    /// Runs one step on parameters and gradients that `lender` lends.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_borrowed(
        &self,
        state: &mut State,
        lender: &mut dyn Lender,
    ) -> Result<StepReport, PlanError> {
        self.run_stages(state, Executor::Lender(lender))
    }

    fn run_stages(
        &self,
        state: &mut State,
        mut executor: Executor<'_>,
    ) -> Result<StepReport, PlanError> {
        self.check_state(state)?;
        check_between_steps(state, "run")?;
        if self.topology.world > 1 || self.micro_steps() > 1 {
            return Err(PlanError::Topology {
                expected: "a plan of one rank and one micro-step for `run`".to_owned(),
                found: format!(
                    "{} ranks and {} micro-steps; use `step`",
                    self.topology.world,
                    self.micro_steps()
                ),
            });
        }
        self.run_update(state, &mut executor, None)
    }

    /// One update: all stages but those that collect gradients.
    pub(crate) fn run_update(
        &self,
        state: &mut State,
        executor: &mut Executor<'_>,
        comms: Option<&mut Comms<'_>>,
    ) -> Result<StepReport, PlanError> {
        let mut begun = self.begin_update(state, executor)?;
        let done = self.each_stage(state, executor, comms, &mut begun.report);
        if let Err(error) = done {
            self.poison(state);
            return Err(error);
        }
        self.end_update(state, executor, begun)
    }

    /// Makes everything ready for the updates of a step.
    pub(crate) fn begin_update(
        &self,
        state: &mut State,
        executor: &Executor<'_>,
    ) -> Result<Begun, PlanError> {
        state.follow_views();
        let derived = match &executor {
            Executor::Backend(backend) => {
                state.settle(*backend)?;
                state.prepare(self, *backend)?
            }
            Executor::Lender(_) => {
                state.refresh(self)?;
                false
            }
        };
        if !derived {
            write_sets(state);
        }
        Ok(Begun {
            report: StepReport {
                step: state.step + 1,
                without_gradient: state.without_gradient_count,
                ..StepReport::default()
            },
            skipped_before: executor.backend().skipped(),
        })
    }

    /// Reads what the step has come to, and counts it.
    pub(crate) fn end_update(
        &self,
        state: &mut State,
        executor: &Executor<'_>,
        begun: Begun,
    ) -> Result<StepReport, PlanError> {
        let Begun {
            mut report,
            skipped_before,
        } = begun;
        if let Err(error) = settle(state, executor, skipped_before, &mut report) {
            self.poison(state);
            return Err(error);
        }
        state.params_version += 1;
        if report.skipped {
            state.forget_without_gradient();
        } else {
            state.advance();
        }
        report.step = state.step;
        Ok(report)
    }

    /// Refuses a state of another plan, or one that a step has failed on.
    pub(crate) fn check_state(&self, state: &State) -> Result<(), PlanError> {
        if state.plan_hash != self.hash {
            return Err(PlanError::ForeignState {
                expected: self.hash,
                found: state.plan_hash,
            });
        }
        match state.poisoned {
            Some(step) => Err(PlanError::Poisoned { step }),
            None => state.check_masters(),
        }
    }

    /// Marks a state as half-changed and says so.
    pub(crate) fn poison(&self, state: &mut State) -> PlanError {
        let step = *state.poisoned.get_or_insert(state.step + 1);
        PlanError::Poisoned { step }
    }

    /// Runs the stages of an update, in order; `comms` where there are several ranks.
    pub(crate) fn each_stage(
        &self,
        state: &mut State,
        executor: &mut Executor<'_>,
        mut comms: Option<&mut Comms<'_>>,
        report: &mut StepReport,
    ) -> Result<(), PlanError> {
        let (mut updates, mut skipped) = (0, false);
        for stage in &self.stages {
            let place = (stage, updates);
            let done =
                self.run_stage(state, executor, comms.as_deref_mut(), place, &mut skipped)?;
            updates += usize::from(stage.update().is_some());
            report.launches += done.launches;
            report.elements += done.elements;
        }
        if let Some(comms) = comms {
            self.share_update_sums(state, executor.backend(), comms, skipped)?;
        }
        Ok(())
    }

    /// Runs one stage, the `update`-th that updates if it does; says whether all updates are
    /// skipped once that is known.
    pub(crate) fn run_stage(
        &self,
        state: &mut State,
        executor: &mut Executor<'_>,
        comms: Option<&mut Comms<'_>>,
        (stage, update): (&Stage, usize),
        skipped: &mut bool,
    ) -> Result<LaunchReport, PlanError> {
        Ok(match (stage, comms) {
            // Gradients of earlier micro-steps are in the arena already.
            (Stage::Accumulate(_), _) => LaunchReport::default(),
            (Stage::Norm(_), None) => state.run_norm(self, executor)?,
            (Stage::Norm(_), Some(comms)) => {
                *skipped = self.decide(state, executor.backend(), comms)?;
                LaunchReport::default()
            }
            (Stage::Optimize(optimize), _) => {
                self.with_gradients(state, optimize.bucket, |state| {
                    state.launch_update(self, (optimize, update), executor)
                })?
            }
            (_, None) => LaunchReport::default(),
            (Stage::Reduce(_), Some(_)) if self.reduces_each() => LaunchReport::default(),
            (Stage::Reduce(reduce), Some(comms)) => {
                let segment = self.buckets[reduce.bucket].segment;
                self.reduce_once(state, executor.backend(), comms, (segment, reduce.bucket))?
            }
            (Stage::Trust, Some(_)) if *skipped => LaunchReport::default(),
            (Stage::Trust, Some(comms)) => {
                self.sum_tensors(state, executor.backend(), comms)?;
                LaunchReport::default()
            }
            (Stage::ReduceUpdate(optimize), Some(comms)) => {
                let place = (optimize, update);
                self.reduce_and_update(state, place, executor.backend(), comms)?
            }
            // After a skipped step nothing has changed.
            (Stage::Gather(_), Some(_)) if *skipped => LaunchReport::default(),
            (Stage::Gather(gather), Some(comms)) => {
                self.bring(state, executor.backend(), comms, gather)?;
                LaunchReport::default()
            }
            // Averages count steps, so they follow once this one is counted.
            (Stage::Average(_), Some(_)) => LaunchReport::default(),
        })
    }

    /// Reduces a segment at the first of its buckets.
    fn reduce_once(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        (segment, bucket): (usize, usize),
    ) -> Result<LaunchReport, PlanError> {
        if self.segments[segment].buckets.start == bucket {
            self.reduce_segment(state, backend, comms, segment)?;
        }
        Ok(LaunchReport::default())
    }
}

/// A step whose updates have begun.
#[derive(Debug)]
pub(crate) struct Begun {
    /// What it has done so far.
    pub(crate) report: StepReport,
    skipped_before: u64,
}

/// Runs the launches of a plan whose parameters and gradients a framework keeps: `launch.lists` and
/// `reduce.list` lack them.
pub trait Lender {
    /// The backend that the state was allocated on.
    fn backend(&self) -> &dyn Backend;

    /// Runs one launch; `launch.members` says which parameter each tensor is.
    ///
    /// # Errors
    /// Those of the backend and of lending.
    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError>;

    /// Reads gradients; `reduce.members` says whose.
    ///
    /// # Errors
    /// As [`Lender::launch`].
    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError>;
}

/// Who runs a step's launches.
pub(crate) enum Executor<'a> {
    /// A backend, on tensors that the state keeps.
    Backend(&'a dyn Backend),
    /// The caller, who lends tensors.
    Lender(&'a mut dyn Lender),
}

impl Executor<'_> {
    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Executor::Backend(backend) => *backend,
            Executor::Lender(lender) => lender.backend(),
        }
    }

    pub(crate) fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.launch(launch),
            Executor::Lender(lender) => lender.launch(launch),
        }
    }

    pub(crate) fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.reduce(reduce),
            Executor::Lender(lender) => lender.reduce(reduce),
        }
    }
}

/// Reads back what a step decided, once all of it is enqueued: no launch has waited for the host.
fn settle(
    state: &mut State,
    executor: &Executor<'_>,
    skipped_before: u64,
    report: &mut StepReport,
) -> Result<(), PlanError> {
    if let Some(norm) = &mut state.norm {
        norm.settle(executor.backend(), 1)?;
        report.grad_norm = Some(norm.block.grad_norm);
        report.non_finite = norm.block.non_finite;
        report.skipped = norm.block.found != 0;
    }
    if report.skipped {
        report.elements = 0;
    }
    report.tensors_skipped = executor.backend().skipped() - skipped_before;
    state.report_update_norm(executor.backend(), report)?;
    report.loss_scale = state.loss_scale().map(|scale| scale.scale());
    Ok(())
}

/// Derives every class's scalars for the step to come, in f64 and rounded once.
fn write_sets(state: &mut State) {
    for storage in 0..state.storages.len() {
        let set_bytes = state.storages[storage].kernel.argument_layout().set_bytes;
        for class in 0..state.schedule.classes.classes.len() {
            let rule = state.storages[storage].spec.rule;
            let values = state.values_of(rule, class);
            let storage = &mut state.storages[storage];
            let set = &mut storage.sets[class * set_bytes..][..set_bytes];
            storage.kernel.write_set(values, set);
        }
    }
}

impl State {
    /// The hyper-parameters of a class of one rule at the step to come.
    fn values_of(&self, rule: usize, class: usize) -> SetValues {
        let class = &self.schedule.classes.classes[class];
        SetValues {
            lr: self.rate(rule),
            lr_scale: class.lr_scale,
            weight_decay: class.weight_decay,
            trust: class.trust,
            step: self.step + 1 - class.steps_behind,
        }
    }

    /// Those of all classes.
    pub(crate) fn set_values(&self, rule: usize) -> impl Iterator<Item = SetValues> {
        let classes = 0..self.schedule.classes.classes.len();
        classes.map(move |class| self.values_of(rule, class))
    }
}
