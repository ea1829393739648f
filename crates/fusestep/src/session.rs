//! A run as a program holds it: plan, memory, backend, ranks and checkpoints in one object.

mod error;
mod gather;
mod report;
mod saves;
mod saving;
mod start;

use fusestep_collective::Communicator;
use fusestep_launch::Backend;
use fusestep_planner::{
    Comms, EnqueuedStep, GradMut, Initial, Lender, MicroStepReport, Optimizer, Plan, PlanError,
    Run, State, StepReport,
};
use fusestep_tensor::{DeviceSliceMut, Element, Role};

pub use self::error::SessionError;
pub use self::report::Report;
use self::report::{CallsSoFar, Reports};
use self::saving::Saving;
use crate::SharedBackend;

/// A training run of one rank: gradients go in, [`Session::step`] updates parameters.
///
/// Parameters and gradients are the session's own and are zero until they are written. All ranks
/// make the same calls. Before their first common step ranks compare what decides their bits and,
/// unless [`StepOptions::initial`](crate::StepOptions::initial) says otherwise, take over the
/// parameters of rank 0. [`Session::run`] is for programs that want more.
pub struct Session<'c> {
    /// Plan, calls and saves; dropped first, which completes the save in flight.
    saving: Saving<'c>,
    state: State,
    /// Behind the state, whose memory it gave.
    backend: SharedBackend,
    /// Whether ranks have compared what decides their bits.
    met: bool,
    /// Parameters that ranks begin with, as the options say.
    initial: Initial,
    /// Parameters that ranks begin with, until they have begun.
    brings: Initial,
    /// Settings of the program's own that ranks compare, too.
    compared: Vec<(&'static str, String)>,
    /// Whether the step under way has looked after saves.
    begun: bool,
    /// The step on borrowed tensors that is enqueued, and its rate.
    enqueued: Option<Enqueued>,
    reports: Reports<'c>,
}

/// Tensors that stay with a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Borrowed {
    /// Parameters and gradients; the session keeps the rule's own tensors.
    Params,
    /// The rule's own tensors, too; the session keeps counts of steps.
    ParamsAndState,
}

/// A step on borrowed tensors whose outcome is not known yet.
struct Enqueued {
    step: EnqueuedStep,
    lr: f64,
}

/// Sessions may be built on one thread and stepped on another.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Session<'static>>();
};

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("rule", self.state.optimizer())
            .field("topology", &self.plan().topology())
            .finish_non_exhaustive()
    }
}

impl<'c> Session<'c> {
    /// The plan of every step; print it.
    pub fn plan(&self) -> &Plan {
        &self.saving.plan
    }

    /// The memory of this rank.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The memory of this rank, for changes of rates and rules.
    pub fn state_mut(&mut self) -> &mut State {
        &mut self.state
    }

    /// The memory of this rank, for views that outlive the session. The save in flight is completed
    /// first, as by a drop.
    pub fn into_state(self) -> State {
        self.state
    }

    /// The backend that steps run on.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// The calls of this rank, counted.
    pub fn comms(&self) -> &Comms<'c> {
        &self.saving.comms
    }

    /// The communicator, for calls of the program's own, which all ranks make between steps.
    pub fn communicator(&mut self) -> &mut dyn Communicator {
        self.saving.comms.communicator()
    }

    /// The run itself, for programs that want more than the session gives, such as
    /// [`Run::prefetch`] or a recorded step ([`Run::capture`]).
    ///
    /// What the session does around a call is left to the program: ranks [meet](Session::meet)
    /// before their first step, and a failure that others may not know of is [told](Session::fail).
    pub fn run(&mut self) -> Run<'_, 'c> {
        let Saving { plan, comms, .. } = &mut self.saving;
        Run::of(plan, &mut self.state, self.backend.as_ref(), comms)
    }

    /// Text of the first failure that other ranks may not know of.
    pub fn failure(&self) -> Option<&str> {
        self.saving.failed.as_deref()
    }

    /// Remembers a failure of the program's own that other ranks may not know of: they may wait
    /// elsewhere, so nothing is waited for when the session is dropped.
    pub fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.saving.failed.get_or_insert_with(|| error.to_string());
    }

    /// Sets a parameter; all ranks set the same. Before ranks meet rank 0 may set it alone: its
    /// values come to all ranks ([`StepOptions::initial`](crate::StepOptions::initial)).
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::WrongDType`], [`PlanError::LenBytes`].
    pub fn set_param<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), PlanError> {
        let checked = check_dtype::<T>(&self.state, Role::Param, name);
        self.saving.noted(checked)?;
        self.write_param(name, bytemuck::cast_slice(values))
    }

    /// [`Session::set_param`] from bytes of the parameter's dtype.
    ///
    /// # Errors
    /// As [`State::write`].
    pub fn write_param(&mut self, name: &str, bytes: &[u8]) -> Result<(), PlanError> {
        self.saving.noted(self.state.write(self.backend.as_ref(), Role::Param, name, bytes))
    }

    /// A parameter that this rank has whole, which is any below ZeRO stage 3. Before ranks meet
    /// ([`StepOptions::initial`](crate::StepOptions::initial)) it is the value of this rank alone.
    ///
    /// # Errors
    /// As [`State::param`].
    pub fn param<T: Element>(&self, name: &str) -> Result<&[T], PlanError> {
        self.state.param(name)
    }

    /// Copies a parameter that this rank has whole into `bytes`.
    ///
    /// # Errors
    /// As [`State::read`].
    pub fn read_param(&self, name: &str, bytes: &mut [u8]) -> Result<(), PlanError> {
        self.state.read(self.backend(), Role::Param, name, bytes)
    }

    /// A gradient, to be written where the step reads it; it counts as given, and is zero until it
    /// is written.
    ///
    /// # Errors
    /// As [`State::grad_mut`].
    pub fn grad_mut<T: Element>(&mut self, name: &str) -> Result<GradMut<'_, T>, PlanError> {
        self.saving.noted(self.state.grad_mut(name))
    }

    /// A gradient on a device, to be written there where the step reads it, in the order of events;
    /// it counts as given, and is not set to zero: write all of it.
    ///
    /// # Errors
    /// As [`State::grad_on_device`].
    pub fn grad_on_device(&mut self, name: &str) -> Result<DeviceSliceMut<'_>, PlanError> {
        self.meet()?;
        self.saving.noted(self.state.grad_on_device(self.backend.as_ref(), name))
    }

    /// Gives a gradient, in the type that gradients are kept in or in its parameter's. With
    /// communication streams its bucket is reduced as soon as it is full,
    /// and updated, too, where the options say that backward passes allow it.
    ///
    /// # Errors
    /// As [`Run::push_grad`]; [`PlanError::WrongDType`].
    pub fn push_grad<T: Element>(&mut self, name: &str, grad: &[T]) -> Result<(), PlanError> {
        self.meet()?;
        self.attempt(|run| {
            // Where gradients are kept wider than parameters, they may come in either type.
            if check_dtype::<T>(run.state(), Role::Param, name).is_err() {
                check_dtype::<T>(run.state(), Role::Grad, name)?;
            }
            run.push_grad(name, bytemuck::cast_slice(grad))
        })
    }

    /// [`Session::push_grad`] from bytes of the gradient's dtype, or of its parameter's.
    ///
    /// # Errors
    /// As [`Run::push_grad`].
    pub fn push_grad_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), PlanError> {
        self.meet()?;
        self.attempt(|run| run.push_grad(name, bytes))
    }

    /// Marks a gradient as complete where its view lies ([`State::grad_mut`]); nothing is copied.
    ///
    /// # Errors
    /// As [`Run::give_view`].
    pub fn give_view(&mut self, name: &str) -> Result<(), PlanError> {
        self.meet()?;
        self.attempt(|run| run.give_view(name))
    }

    /// The factor to multiply the next loss with; 1 unless the loss is scaled.
    pub fn loss_scale(&self) -> f64 {
        self.state.loss_scale().map_or(1.0, |scale| scale.scale())
    }

    /// Tells the loss of the step under way, for its [report](Session::report) and for an adaptive
    /// interval of LocalSGD. There a step without one is followed by an average.
    pub fn set_loss(&mut self, loss: f64) {
        self.state.set_loss(loss);
        self.reports.add_loss(loss);
    }

    /// Tells how many gradients of the step under way had to be copied before they were given, for
    /// its [report](Session::report).
    pub fn count_copied(&mut self, gradients: u64) {
        self.reports.add_copied(gradients);
    }

    /// The report of the last update; `None` before the first one.
    pub fn report(&self) -> Option<&Report> {
        self.reports.last.as_ref()
    }

    /// Measures the seconds of every step's parts from here on, for [`Report::seconds`].
    ///
    /// # Cost
    /// Two readings of the host's clock for each stage and each gradient given.
    pub fn time_steps(&mut self) {
        self.state.time_stages();
    }

    /// Calls `hook` with the report of every update from here on, on the thread that steps; a hook
    /// that was set before hears no more. The update is done by then, whatever the hook does.
    ///
    /// ```
    /// use fusestep::{AdamW, Cpu, DType, ParamDesc, Shape};
    ///
    /// let (tell, told) = std::sync::mpsc::channel();
    /// let w = ParamDesc::new("w", Shape::new([2])?, DType::F32);
    /// let mut session = AdamW::new(1e-3).build(&[w], Cpu::default())?;
    /// session.on_step(move |report| tell.send((report.step, report.elements)).unwrap());
    /// session.push_grad("w", &[3.0f32, 4.0])?;
    /// session.step()?;
    /// assert_eq!(told.recv()?, (1, 2));
    /// # Ok::<(), fusestep::Error>(())
    /// ```
    pub fn on_step(&mut self, hook: impl FnMut(&Report) + Send + 'c) {
        self.reports.hook = Some(Box::new(hook));
    }

    /// Whether somebody hears of each update, by [`Session::on_step`].
    pub fn is_heard(&self) -> bool {
        self.reports.hook.is_some()
    }

    /// Sets a rule of the plan from the next step on, by its number; a rule that is the same
    /// already costs nothing. All ranks set the same.
    ///
    /// # Errors
    /// As [`State::set_optimizer_of`].
    pub fn set_rule(&mut self, number: usize, rule: Optimizer) -> Result<(), PlanError> {
        if self.state.rules().get(number) == Some(&rule) {
            return Ok(());
        }
        self.saving.noted(self.state.set_optimizer_of(number, rule))
    }

    /// Compares settings of the program's own with the others', such as the seed of its data, when
    /// ranks meet.
    pub fn compare_also(&mut self, fields: impl IntoIterator<Item = (&'static str, String)>) {
        self.compared.extend(fields);
    }

    /// Hears of a save that has failed, and lets ranks meet: what a step begins with. A program
    /// calls it where giving gradients makes calls at once ([`Run::calls_while_given`]) and an
    /// error of a save is to come before them; [`Session::step`] does it otherwise.
    ///
    /// # Errors
    /// That of a save; as [`Session::meet`].
    pub fn begin_step(&mut self) -> Result<(), PlanError> {
        self.tell_of_save()?;
        self.look_after_saves()?;
        self.meet()?;
        self.begun = true;
        Ok(())
    }

    /// Ends a micro-step, and at the last one reduces, updates and gathers. Before the first
    /// gradient of many ranks, and behind a checkpoint that was loaded, they compare what
    /// decides the bits of the run.
    ///
    /// # Errors
    /// As [`Run::step`]; as [`Run::handshake`]; that of a save, before the step: call it again.
    pub fn step(&mut self) -> Result<MicroStepReport, PlanError> {
        let begun = std::mem::take(&mut self.begun);
        // Other ranks may be within calls of the step already, and saves are polled by calls of all
        // ranks.
        let behind = !begun && self.run().calls_while_given();
        self.tell_of_save()?;
        if !begun && !behind {
            self.look_after_saves()?;
        }
        self.meet()?;
        let lr = self.state.lr();
        let report = self.attempt(|run| run.step())?;
        self.told(&report, lr);
        if behind {
            // The step is done: an error that is no step's waits for the next call.
            self.saving.untold = self.look_after_saves().err();
        }
        Ok(report)
    }

    /// One step on tensors that `lender` lends.
    ///
    /// # Errors
    /// That of a save, before the step: call it again. As [`RunAlone::step_borrowed`].
    ///
    /// [`RunAlone::step_borrowed`]: fusestep_planner::RunAlone::step_borrowed
    pub fn step_borrowed(&mut self, lender: &mut dyn Lender) -> Result<StepReport, PlanError> {
        self.conclude()?;
        self.tell_of_save()?;
        self.look_after_saves()?;
        let lr = self.state.lr();
        let update = self.attempt(|run| run.alone().step_borrowed(lender))?;
        Ok(self.told_of(update, lr))
    }

    /// [`Session::step_borrowed`] whose outcome a device tells later: this call waits for the
    /// outcome of the step before, and for nothing that was enqueued since. [`Session::conclude`]
    /// waits for this step's; until then reports, counts of steps and loss scales are as before.
    /// A plan that reads no gradients skips no step, and has the report at once.
    ///
    /// # Errors
    /// As [`Session::step_borrowed`]; that of the step before.
    pub fn enqueue_borrowed(
        &mut self,
        lender: &mut dyn Lender,
    ) -> Result<Option<StepReport>, PlanError> {
        self.conclude()?;
        self.tell_of_save()?;
        self.look_after_saves()?;
        let lr = self.state.lr();
        let step = self.attempt(|run| run.alone().enqueue_borrowed(lender))?;
        let is_known = step.is_known();
        self.enqueued = Some(Enqueued { step, lr });
        if is_known { self.conclude() } else { Ok(None) }
    }

    /// Waits for the outcome of the step that is enqueued; `None` if none is.
    ///
    /// # Errors
    /// As [`RunAlone::conclude`].
    ///
    /// [`RunAlone::conclude`]: fusestep_planner::RunAlone::conclude
    pub fn conclude(&mut self) -> Result<Option<StepReport>, PlanError> {
        let Some(Enqueued { step, lr }) = self.enqueued.take() else {
            return Ok(None);
        };
        let update = self.attempt(|run| run.alone().conclude(step))?;
        Ok(Some(self.told_of(update, lr)))
    }

    /// Makes the report of an update on borrowed tensors at rate `lr`.
    fn told_of(&mut self, update: StepReport, lr: f64) -> StepReport {
        let dropped_micro_steps = update.skipped.into();
        let update = Some(update);
        let report = MicroStepReport { update, dropped_micro_steps, ..Default::default() };
        self.told(&report, lr);
        report.update.unwrap_or_default()
    }

    /// Lets the f32 master of a lent parameter follow values that were written outside of a step,
    /// where it does not round to them.
    ///
    /// # Errors
    /// As [`State::follow_borrowed`](fusestep_planner::State::follow_borrowed).
    pub fn follow_borrowed(&mut self, name: &str, bytes: &[u8]) -> Result<(), PlanError> {
        self.saving.noted(self.state.follow_borrowed(self.backend.as_ref(), name, bytes))
    }

    /// Turns the values of a lent parameter into those for evaluation, in `bytes`.
    ///
    /// # Errors
    /// As [`State::average_borrowed`](fusestep_planner::State::average_borrowed).
    pub fn average_borrowed(&self, name: &str, bytes: &mut [u8]) -> Result<(), PlanError> {
        self.state.average_borrowed(self.backend(), name, bytes)
    }

    /// Updates from fewer micro-steps than asked for, at an epoch's end; ranks compare first what a
    /// step compares.
    ///
    /// # Errors
    /// As [`Run::flush`]; as [`Run::handshake`].
    pub fn flush(&mut self) -> Result<MicroStepReport, PlanError> {
        self.begun = false;
        self.meet()?;
        let lr = self.state.lr();
        let report = self.attempt(|run| run.flush())?;
        self.told(&report, lr);
        Ok(report)
    }

    /// Averages parameters, and state if the options say so, over all ranks, under LocalSGD.
    ///
    /// # Errors
    /// As [`Run::average_now`].
    pub fn average_now(&mut self) -> Result<(), PlanError> {
        self.attempt(|run| run.average_now())
    }

    /// Makes the report of an update at rate `lr`, if the micro-step has made one.
    fn told(&mut self, ended: &MicroStepReport, lr: f64) {
        if let Some(update) = &ended.update {
            let now = self.calls_so_far();
            self.reports.add(update, ended, lr, &now, self.state.stage_seconds());
        }
    }

    fn calls_so_far(&self) -> CallsSoFar {
        let comms = &self.saving.comms;
        CallsSoFar { calls: comms.calls(), bytes_sent: comms.bytes_sent() }
    }

    /// Does `work` with the run, and remembers a failure.
    fn attempt<R>(
        &mut self,
        work: impl FnOnce(&mut Run<'_, 'c>) -> Result<R, PlanError>,
    ) -> Result<R, PlanError> {
        let done = work(&mut self.run());
        self.saving.noted(done)
    }
}

fn check_dtype<T: Element>(state: &State, role: Role, name: &str) -> Result<(), PlanError> {
    let expected = state.dtype(role, name)?;
    if expected == T::DTYPE {
        return Ok(());
    }
    Err(PlanError::WrongDType { role, name: name.to_owned(), expected, found: T::DTYPE })
}
