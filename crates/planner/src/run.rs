//! One step: the only loop over a plan's stages.

use fusestep_launch::{Backend, Launch, LaunchReport, SetValues};

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
        self.run_each(state, &mut |launch| backend.launch(launch))
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
        if state.plan_hash != self.hash {
            return Err(PlanError::ForeignState {
                expected: self.hash,
                found: state.plan_hash,
            });
        }
        if let Some(step) = state.poisoned {
            return Err(PlanError::Poisoned { step });
        }
        state.refresh(self)?;
        write_sets(state);
        let mut report = StepReport {
            step: state.step + 1,
            absent: state.absent_count,
            ..StepReport::default()
        };
        for (index, stage) in self.stages.iter().enumerate() {
            let done = match stage {
                Stage::Optimize(optimize) => self.launch(state, optimize.storage, index, launcher),
            };
            match done {
                Ok(done) => {
                    report.launches += done.launches;
                    report.elements += done.elements;
                }
                Err(error) => {
                    state.poisoned = Some(report.step);
                    return Err(error);
                }
            }
        }
        state.advance();
        Ok(report)
    }

    fn launch(
        &self,
        state: &mut State,
        storage: usize,
        stage: usize,
        launcher: Launcher<'_>,
    ) -> Result<LaunchReport, PlanError> {
        let batches = &state.schedule.batches[stage];
        if batches.is_empty() {
            return Ok(LaunchReport::default());
        }
        let spec = &self.storages[storage];
        let storage = &mut state.storages[storage];
        Ok(launcher(Launch {
            kernel: storage.kernel.as_ref(),
            batches,
            offsets: &storage.offsets,
            members: &spec.members,
            lists: &mut storage.lists,
            scalars: &storage.scalars,
            grad_factor: 1.0,
            sets: &storage.sets,
            limits: self.limits.of(storage.kernel.as_ref()),
        })?)
    }
}

/// Derives every class's scalars for the step to come, in f64 and rounded once.
fn write_sets(state: &mut State) {
    let lr = state.optimizer.lr();
    for storage in &mut state.storages {
        let set_bytes = storage.kernel.argument_layout().set_bytes;
        let classes = &state.schedule.classes.classes;
        for (class, set) in classes.iter().zip(storage.sets.chunks_exact_mut(set_bytes)) {
            let values = SetValues {
                lr,
                lr_scale: class.lr_scale,
                weight_decay: class.weight_decay,
                trust: class.trust,
                step: state.step + 1 - class.steps_behind,
            };
            storage.kernel.write_set(values, set);
        }
    }
}
