//! Where the argument tables of a plan's launches lie, and steps that the host does not wait for.

use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_launch::{
    Backend, BackendError, Graph, Launch, Reduce, ResidentTable, SetValues, TensorSums,
};
use fusestep_tensor::Role;
use serde::Serialize;

use crate::arena::keeps_segments;
use crate::comms::Comms;
use crate::in_backward::check_between_steps;
use crate::run::Executor;
use crate::{Note, Optimize, Plan, PlanError, Stage, State, StepReport, Verdict};

/// Where a launch's table of tensors lies. It changes launches and what the host does for them,
/// never a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TableKind {
    /// In the launch's arguments: as many tensors as fit, and the host derives the scalars of every
    /// step.
    #[default]
    Arguments,
    /// In the device's memory, built once: any number of tensors in a launch. The device counts
    /// steps and derives the scalars, so that a step can be recorded in a graph.
    Resident,
    /// In arguments where each stage fits into one launch, else resident.
    Auto,
}

impl TableKind {
    /// The name on the command line and in plans.
    pub const fn name(self) -> &'static str {
        match self {
            TableKind::Arguments => "arguments",
            TableKind::Resident => "resident",
            TableKind::Auto => "auto",
        }
    }
}

impl Plan {
    /// Decides where the tables lie and makes the batches for it.
    pub(crate) fn place_tables(&mut self, asked: TableKind) -> Result<(), PlanError> {
        let most = self.stages.iter().map(|stage| match stage {
            Stage::Norm(norm) => norm.launches() - 1,
            Stage::Optimize(optimize) => optimize.batches.len(),
            _ => 0,
        });
        let most = most.max().unwrap_or(0);
        let borrowed = self.tensors.are_borrowed();
        let note = |verdict, reason: String| Note::new("table", verdict, reason);
        if self.topology.world > 1 {
            if asked != TableKind::Resident {
                return Ok(());
            }
            if let Some(reason) = self.no_tables_of_ranks() {
                self.notes
                    .push(note(Verdict::Refused, format!("arguments: {reason}")));
                return Ok(());
            }
        }
        if self.in_backward {
            if asked != TableKind::Arguments {
                let reason = "arguments: updates of a step begin before it is known whose gradients \
                              it lacks";
                self.notes.push(note(Verdict::Refused, reason.to_owned()));
            }
            return Ok(());
        }
        match asked {
            // Devices have entries that measure for tables in memory only, and would otherwise need
            // twice as many.
            TableKind::Arguments | TableKind::Auto if self.update_norms && !borrowed => {}
            TableKind::Arguments => return Ok(()),
            TableKind::Resident if borrowed => return Err(PlanError::BorrowedTable),
            TableKind::Auto if borrowed => {
                let reason = "arguments: the caller lends tensors anew at every step".to_owned();
                self.notes.push(note(Verdict::Refused, reason));
                return Ok(());
            }
            TableKind::Auto if most <= 1 => {
                let reason = "arguments: every stage fits into one launch".to_owned();
                self.notes.push(note(Verdict::Refused, reason));
                return Ok(());
            }
            TableKind::Resident | TableKind::Auto => {}
        }
        let why = match asked {
            _ if self.update_norms => "for pass `update_norms`".to_owned(),
            TableKind::Resident => "as asked for".to_owned(),
            _ => format!("a stage would take {most} launches with tables in arguments"),
        };
        self.table = TableKind::Resident;
        self.make_batches_anew()?;
        let reason = format!(
            "resident, {why}: built once in the device's memory, and the device derives the \
             scalars; the cpu backend runs the same batches without a table"
        );
        self.notes.push(note(Verdict::Applied, reason));
        Ok(())
    }

    /// Why tables of several ranks cannot lie in memory; `None` if they can.
    fn no_tables_of_ranks(&self) -> Option<&'static str> {
        let has = |asked: fn(&Stage) -> bool| self.stages.iter().any(asked);
        if !keeps_segments(self) {
            Some("gradients of several ranks change their place in memory from ZeRO stage 2 on")
        } else if has(|stage| matches!(stage, Stage::ReduceUpdate(_))) {
            Some("ranks reduce and update in one pass")
        } else if self.update_norms {
            Some("norms of updates of several ranks are not measured on devices")
        } else {
            None
        }
    }

    /// Enqueues one step and waits for nothing. [`State::step`], the loss scale and the count of
    /// skipped steps are as they were until [`State::settle`] reads what the device has
    /// decided; without a stage that reads the gradients nothing is left to read.
    ///
    /// The step of a plan that reads gradients is waited for nevertheless if parameters are without
    /// gradient in it, because the next step's table depends on whether this one was skipped. So
    /// is the step before this one while a schedule still changes the rate.
    ///
    /// # Errors
    /// As [`Plan::run`]; [`PlanError::NotCapturable`] for a plan that reads gradients and whose
    /// tables are in arguments: the host has to know the step before it can write the next
    /// one's.
    /// # Cost
    /// Launches whose arguments are equal at every step, on a device: nothing of the host's work
    /// grows with the tensors.
    pub fn enqueue(&self, state: &mut State, backend: &dyn Backend) -> Result<(), PlanError> {
        self.check_state(state)?;
        check_between_steps(state, "enqueue")?;
        self.check_alone("enqueue", "step")?;
        if state.norm.is_some() && state.tables.kind != TableKind::Resident {
            return Err(not_capturable("its tables are in arguments"));
        }
        if !state.prepare(self, backend)? {
            return self.run(state, backend).map(|_| ());
        }
        let mut report = StepReport::default();
        let done = self.each_stage(state, &mut Executor::Backend(backend), None, &mut report);
        if let Err(error) = done {
            self.poison(state);
            return Err(error);
        }
        state.count_enqueued(backend)
    }

    /// Records a step as a graph; the step is not run. Every [`Plan::replay`] is then one call of
    /// the driver.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] if the tables are in arguments or parameters are without
    /// gradient; [`PlanError::Backend`] on a backend that records no launches.
    pub fn capture(
        &self,
        state: &mut State,
        backend: &dyn Backend,
    ) -> Result<StepGraph, PlanError> {
        self.check_state(state)?;
        check_between_steps(state, "capture")?;
        self.check_alone("capture", "capture_on")?;
        state.check_capturable()?;
        state.prepare(self, backend)?;
        self.record(state, backend, None)
    }

    /// Records the stages of a step.
    pub(crate) fn record(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        mut comms: Option<&mut Comms<'_>>,
    ) -> Result<StepGraph, PlanError> {
        let mut stopped = None;
        let graph = backend.capture(&mut || {
            let mut executor = Executor::Backend(backend);
            let (comms, mut report) = (comms.as_deref_mut(), StepReport::default());
            let done = self.each_stage(state, &mut executor, comms, &mut report);
            done.map_err(|error| match error {
                PlanError::Backend(error) => error,
                other => {
                    let reason = other.to_string();
                    stopped = Some(other);
                    BackendError::Unavailable {
                        backend: backend.name(),
                        reason,
                    }
                }
            })
        });
        let graph = graph.map_err(|error| stopped.unwrap_or(error.into()))?;
        Ok(StepGraph {
            graph,
            generation: state.tables.generation,
        })
    }

    /// Enqueues the recorded step once more, as [`Plan::enqueue`] would. A learning rate set since
    /// is written first.
    ///
    /// # Errors
    /// [`PlanError::StaleGraph`] if the state's tables have been built anew since, because
    /// parameters were without gradient, the rule was changed, or steps were set or loaded; as
    /// [`Plan::run`].
    pub fn replay(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        graph: &StepGraph,
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        check_between_steps(state, "replay")?;
        self.check_alone("replay", "replay_on")?;
        self.replay_recorded(state, backend, graph)
    }

    /// Refuses plans of several ranks.
    fn check_alone(&self, what: &str, instead: &str) -> Result<(), PlanError> {
        if self.topology.world == 1 {
            return Ok(());
        }
        Err(PlanError::Topology {
            expected: format!("a plan of one rank for `{what}`"),
            found: format!("{} ranks; use `{instead}`", self.topology.world),
        })
    }

    /// Enqueues a recorded step.
    pub(crate) fn replay_recorded(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        graph: &StepGraph,
    ) -> Result<(), PlanError> {
        let built_anew = state.tables.generation != graph.generation;
        if built_anew || state.schedule.stale || state.without_gradient_count > 0 {
            return Err(PlanError::StaleGraph);
        }
        state.publish_lr(backend)?;
        if let Err(error) = graph.graph.launch() {
            state.poisoned = Some(state.step + 1);
            return Err(error.into());
        }
        state.count_enqueued(backend)
    }
}

pub(crate) fn not_capturable(found: &'static str) -> PlanError {
    PlanError::NotCapturable { found }
}

/// A step recorded by [`Plan::capture`]; keeps the memory that it runs on.
#[derive(Debug)]
pub struct StepGraph {
    graph: Box<dyn Graph>,
    /// Of the tables that it runs on.
    generation: u64,
}

/// A state's tables in its backend's memory.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) kind: TableKind,
    /// One for each stage that updates; none for a stage without batches.
    pub(crate) updates: Vec<Option<Box<dyn ResidentTable>>>,
    /// One for each storage whose gradients are read.
    pub(crate) reads: Vec<Option<Box<dyn ResidentTable>>>,
    /// Which tables these are among all that were built; 0 before the first.
    generation: u64,
    /// The bits of the learning rates that they derive sets from, of each rule.
    rates: Vec<u64>,
    /// Steps enqueued whose outcome the host does not know.
    pending: u64,
    /// The steps pending were counted before the state's step was set from outside.
    superseded: bool,
}

impl Tables {
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            kind: plan.table,
            ..Self::default()
        }
    }

    pub(crate) fn supersede(&mut self) {
        self.superseded = self.pending > 0;
    }

    /// An error if a step's outcome is not known.
    pub(crate) fn check_settled(&self) -> Result<(), PlanError> {
        match self.pending {
            0 => Ok(()),
            pending => Err(PlanError::Unsettled { pending }),
        }
    }
}

impl State {
    /// Reads what the device has decided in the steps enqueued: how many of them were applied, the
    /// loss scale, and how many were skipped. Waits for the device.
    ///
    /// # Errors
    /// [`PlanError::Backend`].
    pub fn settle(&mut self, backend: &dyn Backend) -> Result<(), PlanError> {
        // Parameters set without gradient since then are so in the next step, not in these.
        self.step += self.read_applied(backend)?;
        Ok(())
    }

    /// How many of the steps pending were applied; those before the step was set from outside do
    /// not count.
    fn read_applied(&mut self, backend: &dyn Backend) -> Result<u64, PlanError> {
        let pending = std::mem::take(&mut self.tables.pending);
        let Some(norm) = self.norm.as_mut().filter(|_| pending > 0) else {
            return Ok(0);
        };
        let before = norm.block.applied;
        norm.settle(backend, pending)?;
        let applied = norm.block.applied.saturating_sub(before);
        if std::mem::take(&mut self.tables.superseded) {
            Ok(0)
        } else {
            Ok(applied)
        }
    }

    /// Counts a step that was enqueued.
    fn count_enqueued(&mut self, backend: &dyn Backend) -> Result<(), PlanError> {
        if self.norm.is_none() {
            self.advance();
            return Ok(());
        }
        self.tables.pending += 1;
        if self.without_gradient_count > 0 {
            match self.read_applied(backend)? {
                0 => self.forget_without_gradient(),
                _ => self.advance(),
            }
        }
        Ok(())
    }

    /// Makes batches and tables ready for a step; whether the backend derives the sets itself.
    pub(crate) fn prepare(
        &mut self,
        plan: &Plan,
        backend: &dyn Backend,
    ) -> Result<bool, PlanError> {
        if self.schedule.stale {
            self.settle(backend)?;
            self.tables.generation = 0;
        }
        self.refresh(plan)?;
        if self.tables.kind != TableKind::Resident {
            return Ok(false);
        }
        if self.tables.generation == 0 {
            self.build_tables(plan, backend)?;
        }
        self.publish_lr(backend)?;
        // Those of several ranks are built with the first launch of each stage, and not for all.
        Ok(plan.topology.world == 1 && self.derives_sets())
    }

    /// Refuses to record a step that hangs on what the host does.
    pub(crate) fn check_capturable(&self) -> Result<(), PlanError> {
        if self.tables.kind != TableKind::Resident {
            return Err(not_capturable("its tables are in arguments"));
        }
        if self.without_gradient_count > 0 {
            return Err(not_capturable(
                "parameters are without gradient in the next step",
            ));
        }
        Ok(())
    }

    /// Whether the backend has tables and derives the sets itself.
    fn derives_sets(&self) -> bool {
        let mut all = self.tables.updates.iter().zip(&self.schedule.batches);
        all.all(|(table, batches)| table.is_some() || batches.is_empty())
    }

    fn publish_lr(&mut self, backend: &dyn Backend) -> Result<(), PlanError> {
        let unsettled = self.tables.pending > 0 && self.rate_may_change();
        if unsettled {
            // The rate follows from how many steps were applied.
            self.settle(backend)?;
        }
        let rates = || (0..self.rules.len()).map(|rule| self.rate(rule).to_bits());
        if !rates().eq(self.tables.rates.iter().copied()) {
            self.tables.rates = rates().collect();
            let tables = self.tables.updates.iter_mut().zip(&self.updated);
            for (table, &storage) in tables {
                let rule = self.storages[storage].spec.rule;
                if let Some(table) = table {
                    let lr = f64::from_bits(self.tables.rates[rule]);
                    backend.set_table_lr(table.as_mut(), lr)?;
                }
            }
            if let Some(trust) = &mut self.exchange.trust_on_device {
                let (rates, storages) = (&self.tables.rates, &self.storages);
                trust.set_lr(backend, |stage| {
                    f64::from_bits(rates[storages[stage.storage].spec.rule])
                })?;
            }
        }
        Ok(())
    }

    fn build_tables(&mut self, plan: &Plan, backend: &dyn Backend) -> Result<(), PlanError> {
        // Numbers of no meaning but to be different, so that a graph is not taken for one of
        // another state.
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        self.tables.updates.clear();
        self.tables.reads.clear();
        for (update, stage) in plan.optimize_stages().enumerate() {
            let table = match plan.topology.world {
                1 => self.place_update(plan, (stage, update), backend)?,
                _ => None,
            };
            self.tables.updates.push(table);
        }
        if plan.topology.world == 1 {
            self.build_reads(plan, backend)?;
        }
        let rates = (0..self.rules.len()).map(|rule| self.rate(rule).to_bits());
        self.tables.rates = rates.collect();
        self.tables.generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The table of a stage that updates, whose gradients are where the launch reads them.
    pub(crate) fn place_update(
        &mut self,
        plan: &Plan,
        (stage, update): (&Optimize, usize),
        backend: &dyn Backend,
    ) -> Result<Option<Box<dyn ResidentTable>>, PlanError> {
        let rule = self.storages[stage.storage].spec.rule;
        let values: Vec<SetValues> = self.set_values(rule).collect();
        Ok(match self.launch_of(plan, stage, update) {
            // Sums that the host has go with arguments.
            Some(Launch {
                tensor_sums: Some(TensorSums::Host(_)),
                ..
            })
            | None => None,
            Some(launch) => backend.place_table(&launch, &values)?,
        })
    }

    fn build_reads(&mut self, plan: &Plan, backend: &dyn Backend) -> Result<(), PlanError> {
        let Some(norm) = &mut self.norm else {
            return Ok(());
        };
        norm.place(plan, &self.schedule.norm, backend)?;
        let mut first_partial = 0;
        for (index, batches) in self.schedule.norm.iter().enumerate() {
            let storage = &self.storages[index];
            let list = storage.lists.iter().find(|list| list.role() == Role::Grad);
            let table = match list.filter(|_| !batches.is_empty()) {
                Some(list) => backend.place_reduction(&Reduce {
                    kernel: norm.kernels[index].0.as_ref(),
                    batches,
                    offsets: storage.spec.layout.offsets(),
                    members: &plan.storages[index].members,
                    list: Some(list),
                    partials: norm.partials.as_mut(),
                    first_partial,
                })?,
                None => None,
            };
            self.tables.reads.push(table);
            first_partial += batches.iter().map(|b| u64::from(b.chunks)).sum::<u64>();
        }
        Ok(())
    }
}
