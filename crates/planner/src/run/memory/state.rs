//! State of one rank: the memory that a plan runs on.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use fusestep_launch::{Backend, Batch, ListBuffer, check_width};
use fusestep_schedule::Schedule as LrSchedule;
use fusestep_tensor::{DType, ParamDesc, Role};

use crate::error::{PlanError, Result};
use crate::plan::group::ParameterGroups;
use crate::plan::rule::{Optimizer, Precisions};
use crate::plan::settings::Tensors;
use crate::plan::stage::role_names;
use crate::plan::value::Plan;
use crate::run::clock::Clock;
use crate::run::memory::adapting::Adapting;
use crate::run::memory::exchange::Exchange;
use crate::run::memory::gradients::GradientArena;
use crate::run::memory::masters::Masters;
use crate::run::memory::norm::NormState;
use crate::run::memory::segment_state::Given;
use crate::run::memory::storage::StorageState;
use crate::run::memory::tables::Tables;
use crate::run::memory::units::InBackward;
use crate::run::memory::update_sums::UpdateReader;
use crate::run::memory::written::Written;

/// Most steps that a state counts: thousands of years of them.
pub const MAX_STEPS: u64 = 1 << 53;

/// Tensors, step counts, gradients and learning rate of one rank of a training run, allocated by
/// [`Plan::allocate`].
pub struct State {
    pub(crate) plan_hash: u64,
    pub(crate) params: Arc<[ParamDesc]>,
    pub(crate) tensors: Tensors,
    /// The rules at their base learning rates.
    pub(crate) rules: Vec<Optimizer>,
    /// The rules that the plan has.
    pub(crate) built: Vec<Optimizer>,
    /// Settings of the plan that files store.
    pub(crate) settings: BTreeMap<String, String>,
    /// Whether files of other settings are accepted.
    pub(crate) any_settings: bool,
    /// Whether ranks average their parameters.
    pub(crate) averages_ranks: bool,
    /// The hash of the rules that ranks compare, until they change.
    pub(crate) rules_hash: Option<u64>,
    /// The schedule that multiplies the rules' rates.
    pub(crate) lr_schedule: Option<Arc<LrSchedule>>,
    pub(crate) precisions: Precisions,
    pub(crate) storages: Vec<StorageState>,
    /// Storage of each parameter, and the parameter's position there.
    pub(crate) places: Vec<(usize, usize)>,
    pub(crate) masters: Masters,
    pub(crate) index: HashMap<String, usize>,
    pub(crate) step: u64,
    /// Steps that each parameter has missed.
    pub(crate) steps_behind: Vec<u64>,
    /// Whether the next step leaves a parameter out, by parameter.
    pub(crate) without_gradient: Vec<bool>,
    pub(crate) without_gradient_count: u64,
    pub(crate) schedule: Schedule,
    pub(crate) tables: Tables,
    pub(crate) poisoned: Option<u64>,
    /// The memory of stage `norm`, if the plan has it.
    pub(crate) norm: Option<NormState>,
    /// Whether the plan scales the loss.
    pub(crate) scaled: bool,
    /// The storage of each stage that updates.
    pub(crate) updated: Vec<usize>,
    /// Reader of the sums that updates leave over their changes, if the plan asks for them.
    pub(crate) update_reader: Option<UpdateReader>,
    /// Gradients that micro-steps add and ranks reduce.
    pub(crate) arena: GradientArena,
    /// Updates that run before the step does.
    pub(crate) in_backward: InBackward,
    /// Memory of sums that ranks exchange.
    pub(crate) exchange: Exchange,
    /// Steps since parameters were averaged across ranks.
    pub(crate) since_average: u64,
    pub(crate) adapting: Adapting,
    /// Number of changes of parameters.
    pub(crate) params_version: u64,
    /// Writes of callers since the last step.
    pub(crate) written: Written,
    pub(crate) backend: &'static str,
    pub(crate) clock: Clock,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("step", &self.step).finish_non_exhaustive()
    }
}

/// The batches to run: the plan's own, unless tensors are without gradient or behind.
pub(crate) struct Schedule {
    pub(crate) groups: ParameterGroups,
    /// Batches of each stage that updates.
    pub(crate) batches: Vec<Vec<Batch>>,
    /// Batches of each read of stage `norm`.
    pub(crate) norm: Vec<Vec<Batch>>,
    /// Whether the tensors without gradient or with missed steps have changed since the schedule
    /// was made.
    pub(crate) stale: bool,
}

impl State {
    /// Steps run so far, as far as [`State::settle`] has read.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Steps that this parameter has taken: fewer than [`State::step`] if it was without gradient.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn step_of(&self, name: &str) -> Result<u64> {
        Ok(self.step - self.steps_behind[self.find(name)?])
    }

    /// Sets the steps run so far, for all parameters, [`MAX_STEPS`] at most: what resuming from a
    /// file does. State that was written belongs to a count above 0, or a save refuses it.
    pub fn set_step(&mut self, step: u64) {
        self.tables.superseded = self.tables.pending > 0;
        self.step = step.min(MAX_STEPS);
        self.steps_behind.fill(0);
        self.schedule.stale = true;
    }

    /// Sets the steps that one parameter has taken.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`]; [`PlanError::StepAhead`] if it exceeds [`State::step`].
    pub fn set_step_of(&mut self, name: &str, step: u64) -> Result<()> {
        let param = self.find(name)?;
        let behind = self.step.checked_sub(step);
        let behind = behind.ok_or_else(|| PlanError::StepAhead {
            name: name.to_owned(),
            expected: self.step,
            found: step,
        })?;
        self.schedule.stale |= self.steps_behind[param] != behind;
        self.steps_behind[param] = behind;
        Ok(())
    }

    /// The steps that each parameter has taken, in plan order.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.steps_behind.iter().map(|behind| self.step - behind)
    }

    /// Sets the steps that each parameter has taken, in plan order, [`MAX_STEPS`] at most: what a
    /// framework that counts them itself does.
    ///
    /// # Panics
    /// If they are not as many as the plan has parameters.
    pub fn set_steps(&mut self, steps: impl ExactSizeIterator<Item = u64> + Clone) {
        assert_eq!(steps.len(), self.steps_behind.len(), "one step count for each parameter");
        let most = steps.clone().max().unwrap_or(0).min(MAX_STEPS);
        self.set_step(most);
        for (behind, step) in self.steps_behind.iter_mut().zip(steps) {
            *behind = most - step.min(MAX_STEPS);
        }
    }

    /// The learning rate of the next step, of parameters without a rule of their own: the base
    /// rate, times the schedule's factor if the plan has one.
    pub fn lr(&self) -> f64 {
        self.rate(0)
    }

    /// [`State::lr`] of one of the plan's rules.
    ///
    /// # Errors
    /// [`PlanError::UnknownRule`].
    pub fn lr_of(&self, rule: usize) -> Result<f64> {
        self.check_rule(rule)?;
        Ok(self.rate(rule))
    }

    /// The factor of the plan's schedule for the rates of the next step; 1 without one.
    pub fn lr_factor(&self) -> f64 {
        let schedule = self.lr_schedule.as_ref();
        schedule.map_or(1.0, |schedule| schedule.factor(self.step))
    }

    /// Refuses a number that no rule has.
    pub(crate) fn check_rule(&self, rule: usize) -> Result<()> {
        let count = self.rules.len();
        if rule < count {
            return Ok(());
        }
        Err(PlanError::UnknownRule { rule, count })
    }

    pub(crate) fn rate(&self, rule: usize) -> f64 {
        self.rules[rule].lr() * self.lr_factor()
    }

    /// Whether the next step may have another rate than later ones.
    pub(crate) fn rate_may_change(&self) -> bool {
        let schedule = self.lr_schedule.as_ref();
        schedule.is_some_and(|own| own.settled_from().is_none_or(|end| self.step < end))
    }

    /// Sets the base learning rate from the next step on, of parameters without a rule of their
    /// own.
    ///
    /// # Errors
    /// The optimizer's error if `lr` is negative or not finite; [`PlanError::StepUnderWay`]. The
    /// old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.set_lr_of(0, lr)
    }

    /// Sets the base rate of one of the plan's rules ([`crate::Planner::group`]), which are
    /// numbered in the order they were given; 0 is that of all other parameters.
    ///
    /// # Errors
    /// As [`State::set_lr`]; [`PlanError::UnknownRule`].
    pub fn set_lr_of(&mut self, rule: usize, lr: f64) -> Result<()> {
        self.check_between_steps("learning rate")?;
        self.check_rule(rule)?;
        let optimizer = self.rules[rule].with_lr(lr);
        optimizer.validate()?;
        for storage in self.storages.iter().filter(|storage| storage.spec.rule == rule) {
            check_width(optimizer.rule(), storage.spec.param_dtype())?;
        }
        self.rules[rule] = optimizer;
        self.rules_hash = None;
        Ok(())
    }

    /// The rule of parameters without one of their own, at its base learning rate.
    pub fn optimizer(&self) -> &Optimizer {
        &self.rules[0]
    }

    /// All rules, at their base learning rates.
    pub fn rules(&self) -> &[Optimizer] {
        &self.rules
    }

    /// Changes the hyper-parameters of parameters without a rule of their own, from the next step
    /// on.
    ///
    /// # Errors
    /// The optimizer's error for a value out of range; [`PlanError::OtherLists`] if the rule keeps
    /// other tensors, [`PlanError::OtherRule`] if its kernel takes other scalars,
    /// [`PlanError::StepUnderWay`]. The old rule stays then.
    pub fn set_optimizer(&mut self, optimizer: Optimizer) -> Result<()> {
        self.set_optimizer_of(0, optimizer)
    }

    /// Changes the hyper-parameters of one of the plan's rules, numbered as [`State::set_lr_of`]
    /// says, from the next step on.
    ///
    /// # Errors
    /// As [`State::set_optimizer`]; [`PlanError::UnknownRule`].
    pub fn set_optimizer_of(&mut self, rule: usize, optimizer: Optimizer) -> Result<()> {
        replace_rule(self, rule, optimizer)
    }

    /// Leaves a parameter out of the next step: it has no gradient. It, its state and its step stay
    /// as they are.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn set_without_gradient(&mut self, name: &str) -> Result<()> {
        let param = self.find(name)?;
        self.set_without_gradient_at(param);
        Ok(())
    }

    /// [`State::set_without_gradient`] by the parameter's position in the plan.
    ///
    /// # Panics
    /// If the plan has no such parameter.
    pub fn set_without_gradient_at(&mut self, param: usize) {
        if !self.without_gradient[param] {
            self.without_gradient[param] = true;
            self.without_gradient_count += 1;
            self.schedule.stale = true;
        }
    }

    /// Roles that the state keeps for a parameter.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`].
    pub fn roles(&self, name: &str) -> Result<Vec<Role>> {
        let (storage, _) = self.places[self.find(name)?];
        let lists = self.storages[storage].lists.iter();
        Ok(lists.map(ListBuffer::role).collect())
    }

    /// The storage type of a tensor.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::NoSuchList`].
    pub fn dtype(&self, role: Role, name: &str) -> Result<DType> {
        let (storage, list) = self.list_index(role, name)?;
        Ok(self.storages[storage].lists[list].dtype())
    }

    /// Refuses another plan than the state's, and a state that a step has failed on.
    pub(crate) fn check_plan(&self, plan: &Plan) -> Result<()> {
        if self.plan_hash != plan.hash {
            return Err(PlanError::ForeignState { expected: plan.hash, found: self.plan_hash });
        }
        match self.poisoned {
            Some(step) => Err(PlanError::Poisoned { step }),
            None => check_masters(self),
        }
    }

    /// Refuses to save counts that no reader takes.
    pub(crate) fn check_counts(&self) -> Result<()> {
        for (what, found) in [("steps", self.step()), ("skipped steps", self.skipped())] {
            if found > MAX_STEPS {
                return Err(PlanError::Checkpoint {
                    path: "state".to_owned(),
                    what: what.to_owned(),
                    expected: format!("{MAX_STEPS} at most, beyond which no run can be resumed"),
                    found: found.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Refuses a call while a step has updated some of its buckets in backward: it would reach the
    /// other buckets only.
    pub(crate) fn check_between_steps(&self, what: &'static str) -> Result<()> {
        let step = self.step + 1;
        match self.in_backward.updated() {
            None => Ok(()),
            Some(updated) => Err(PlanError::StepUnderWay { what, step, updated }),
        }
    }

    /// Marks the state as half-changed; returns the error.
    pub(crate) fn poison(&mut self) -> PlanError {
        let step = *self.poisoned.get_or_insert(self.step + 1);
        PlanError::Poisoned { step }
    }

    /// Passes on what has been done; the state is half-changed where that is an error.
    pub(crate) fn or_poison<T, E>(&mut self, done: Result<T, E>) -> Result<T, E> {
        done.inspect_err(|_| {
            self.poison();
        })
    }

    pub(crate) fn advance(&mut self) {
        self.step += 1;
        if self.without_gradient_count > 0 {
            for (behind, without_gradient) in
                self.steps_behind.iter_mut().zip(&mut self.without_gradient)
            {
                *behind += u64::from(std::mem::take(without_gradient));
            }
            self.without_gradient_count = 0;
            self.schedule.stale = true;
        }
    }

    /// After a skipped step nobody has missed anything.
    pub(crate) fn forget_without_gradient(&mut self) {
        if self.without_gradient_count > 0 {
            self.without_gradient.fill(false);
            self.without_gradient_count = 0;
            self.schedule.stale = true;
        }
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        let found = self.index.get(name).copied();
        found.ok_or_else(|| PlanError::UnknownName {
            name: name.to_owned(),
            parameters: self.params.len(),
        })
    }

    /// Whether gradients of an update that is still to come have been given.
    pub fn has_gradients(&self) -> bool {
        self.arena.has_begun() || self.arena.now.iter().any(|given| *given != Given::No)
    }

    /// Weighs the gradients of the micro-step under way, before the first of them is given: the
    /// number of its samples, if updates are means of micro-steps of unequal length.
    ///
    /// With [`crate::Lanes`] all ranks weigh, or none. A rank without a micro-batch sets any.
    ///
    /// # Errors
    /// [`PlanError::Weight`] for one that is not above 0, or that f32, in which gradients are
    /// added, has as 0 or infinite; [`PlanError::WeightLate`] behind the first gradient. The weight
    /// before stays.
    pub fn set_weight(&mut self, weight: f64) -> Result<()> {
        let given = self.arena.now.iter().filter(|given| **given == Given::Pushed).count();
        if given > 0 {
            return Err(PlanError::WeightLate { given });
        }
        if weight > 0.0 && (weight as f32).is_normal() {
            self.arena.weight = Some(weight);
            if let Some(window) = &mut self.arena.window {
                window.is_weighted = true;
            }
            return Ok(());
        }
        Err(PlanError::Weight { found: weight })
    }

    /// Tells the loss of the step under way, for an adaptive interval of LocalSGD.
    pub fn set_loss(&mut self, loss: f64) {
        self.adapting.loss = Some(loss);
    }

    /// Reads what the device has decided in the steps enqueued: how many of them were applied, the
    /// loss scale, and how many were skipped. Waits for the device.
    ///
    /// # Errors
    /// [`PlanError::Backend`].
    pub fn settle(&mut self, backend: &dyn Backend) -> Result<()> {
        // Parameters set without gradient since then are so in the next step, not in these.
        self.step += read_applied(self, backend)?;
        Ok(())
    }
}

/// The count of pending steps that were applied; steps before the step was set from outside do not
/// count.
pub(crate) fn read_applied(state: &mut State, backend: &dyn Backend) -> Result<u64> {
    let pending = std::mem::take(&mut state.tables.pending);
    let Some(norm) = state.norm.as_mut().filter(|_| pending > 0) else {
        return Ok(0);
    };
    let before = norm.block.applied;
    norm.settle(backend, pending)?;
    let applied = norm.block.applied.saturating_sub(before);
    if std::mem::take(&mut state.tables.superseded) { Ok(0) } else { Ok(applied) }
}

/// Refuses a step before every master has values.
fn check_masters(state: &State) -> Result<()> {
    if !state.masters.any_awaited {
        return Ok(());
    }
    let mut awaited = state.params.iter().zip(&state.masters.awaited);
    match awaited.find(|(param, awaited)| **awaited && param.numel() > 0) {
        Some((param, _)) => Err(PlanError::BorrowedMaster { name: param.name.clone() }),
        None => Ok(()),
    }
}

/// [`State::set_optimizer_of`].
fn replace_rule(state: &mut State, rule: usize, optimizer: Optimizer) -> Result<()> {
    state.check_between_steps("optimizer")?;
    state.check_rule(rule)?;
    optimizer.validate()?;
    let mut kernels = Vec::with_capacity(state.storages.len());
    for (index, storage) in state.storages.iter().enumerate() {
        let member = storage.spec.members.first().filter(|_| storage.spec.rule == rule);
        let Some(&member) = member else { continue };
        let kernel = optimizer.kernel(&state.params[member as usize], &state.precisions)?;
        let (expected, found) = (storage.kernel.lists(), kernel.lists());
        if expected != found {
            return Err(PlanError::OtherLists {
                expected: role_names(expected),
                found: role_names(found),
            });
        }
        // Batches and workspaces were made for the kernel's argument layout and for whether it
        // takes sums.
        let fits = storage.kernel.argument_layout() == kernel.argument_layout()
            && storage.kernel.normed().is_some() == kernel.normed().is_some();
        if !fits {
            return Err(PlanError::OtherRule {
                expected: state.rules[rule].name(),
                found: optimizer.name(),
            });
        }
        kernels.push((index, kernel));
    }
    for (index, kernel) in kernels {
        let storage = &mut state.storages[index];
        kernel.write_scalars(&mut storage.scalars);
        storage.kernel = kernel;
    }
    state.schedule.stale = true;
    state.rules[rule] = optimizer;
    state.rules_hash = None;
    Ok(())
}
