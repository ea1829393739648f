//! One step: the only loop over a plan's stages.

use fusestep_launch::{Backend, BackendError, Launch, LaunchReport, SetValues};

use crate::plan::Launcher;
use crate::{Plan, PlanError, Stage, State, StepReport, Tensors};

impl Plan {
    /// Runs one step on a state that keeps parameters and gradients.
    ///
    /// Allocates nothing while the same tensors take part as in the step before.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::NoSuchList`] if the plan's tensors are lent; nothing has been written then.
    /// [`PlanError::Backend`] if the device fails half-way; the state refuses further steps then ([`PlanError::Poisoned`]).
    /// # Cost
    /// [`Plan::traffic_bytes`] of memory traffic in [`Plan::launches`] launches.
    pub fn run(&self, state: &mut State, backend: &dyn Backend) -> Result<StepReport, PlanError> {
        if self.tensors == Tensors::Lent {
            return Err(PlanError::NoSuchList {
                role: fusestep_tensor::Role::Param,
                name: self
                    .params
                    .first()
                    .map_or(String::new(), |p| p.name.clone()),
                hint: "its tensors are lent; use `run_each`",
            });
        }
        self.run_stages(state, Executor::Backend(backend))
    }

    /// Runs one step, handing each stage's launch to `launcher`: for backends that take tensors the caller lends.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_each(
        &self,
        state: &mut State,
        launcher: Launcher<'_>,
    ) -> Result<StepReport, PlanError> {
        if self.gradients.rule().is_some() {
            return Err(PlanError::NeedsBackend);
        }
        self.run_stages(state, Executor::Launcher(launcher))
    }

    fn run_stages(
        &self,
        state: &mut State,
        mut executor: Executor<'_>,
    ) -> Result<StepReport, PlanError> {
        self.check_state(state)?;
        state.follow_views();
        let derived = match &executor {
            Executor::Backend(backend) => {
                state.settle(*backend)?;
                state.prepare(self, *backend)?
            }
            Executor::Launcher(_) => {
                state.refresh(self)?;
                false
            }
        };
        if !derived {
            write_sets(state);
        }
        let mut report = StepReport {
            step: state.step + 1,
            absent: state.absent_count,
            ..StepReport::default()
        };
        let done = self.each_stage(state, &mut executor, &mut report);
        if let Err(error) = done.and_then(|()| settle(state, &executor, &mut report)) {
            state.poisoned = Some(state.step + 1);
            return Err(error);
        }
        match report.skipped {
            true => state.forget_absent(),
            false => state.advance(),
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

    pub(crate) fn each_stage(
        &self,
        state: &mut State,
        executor: &mut Executor<'_>,
        report: &mut StepReport,
    ) -> Result<(), PlanError> {
        let mut updates = 0;
        for stage in &self.stages {
            let done = match stage {
                Stage::Norm(_) => executor.norm(self, state)?,
                Stage::Optimize(optimize) => {
                    updates += 1;
                    state.launch_update(self, (optimize.storage, updates - 1), executor)?
                }
            };
            report.launches += done.launches;
            report.elements += done.elements;
        }
        Ok(())
    }
}

/// Who runs a step's launches.
pub(crate) enum Executor<'a> {
    /// A backend, on tensors that the state keeps.
    Backend(&'a dyn Backend),
    /// The caller, who lends tensors; its plans have no stage that reads all gradients.
    Launcher(Launcher<'a>),
}

impl Executor<'_> {
    pub(crate) fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        match self {
            Executor::Backend(backend) => backend.launch(launch),
            Executor::Launcher(launcher) => launcher(launch),
        }
    }

    fn norm(&self, plan: &Plan, state: &mut State) -> Result<LaunchReport, PlanError> {
        match self {
            Executor::Backend(backend) => state.run_norm(plan, *backend),
            Executor::Launcher(_) => Err(PlanError::NeedsBackend),
        }
    }
}

/// Reads back what a step decided, once all of it is enqueued: no launch has waited for the host.
fn settle(
    state: &mut State,
    executor: &Executor<'_>,
    report: &mut StepReport,
) -> Result<(), PlanError> {
    if let (Some(norm), Executor::Backend(backend)) = (&mut state.norm, executor) {
        norm.settle(*backend, 1)?;
        report.grad_norm = Some(norm.block.grad_norm);
        report.non_finite = norm.block.non_finite;
        report.skipped = norm.block.found != 0;
    }
    if report.skipped {
        report.elements = 0;
    }
    report.loss_scale = state.loss_scale().map(|scale| scale.scale());
    Ok(())
}

/// Derives every class's scalars for the step to come, in f64 and rounded once.
fn write_sets(state: &mut State) {
    for storage in 0..state.storages.len() {
        let set_bytes = state.storages[storage].kernel.argument_layout().set_bytes;
        for class in 0..state.schedule.classes.classes.len() {
            let values = state.values_of(class);
            let storage = &mut state.storages[storage];
            let set = &mut storage.sets[class * set_bytes..][..set_bytes];
            storage.kernel.write_set(values, set);
        }
    }
}

impl State {
    /// The hyper-parameters of a class at the step to come.
    fn values_of(&self, class: usize) -> SetValues {
        let class = &self.schedule.classes.classes[class];
        SetValues {
            lr: self.optimizer.lr(),
            lr_scale: class.lr_scale,
            weight_decay: class.weight_decay,
            trust: class.trust,
            step: self.step + 1 - class.steps_behind,
        }
    }

    /// Those of all classes.
    pub(crate) fn set_values(&self) -> impl Iterator<Item = SetValues> {
        (0..self.schedule.classes.classes.len()).map(|class| self.values_of(class))
    }
}
