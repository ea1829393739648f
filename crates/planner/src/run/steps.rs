//! Methods of a run that take gradients and make steps, recorded steps included.
//!
//! A method that is long calls a function of the module that it names.

use crate::error::Result;
use crate::run::clock::StepPart;
use crate::run::graph::RankGraph;
use crate::run::report::MicroStepReport;
use crate::run::run::Run;
use crate::run::stages::{average, give, reduce};
use crate::run::{graph, micro_step};
#[cfg(doc)]
use crate::{PlanError, State};

impl<'c> Run<'_, 'c> {
    /// Takes the gradient of parameter `name` for the micro-step under way, in one pass that copies
    /// or adds it into the arena.
    ///
    /// `bytes` are all elements of the gradient, in the type of
    /// [`Plan::grad_dtype`](crate::Plan::grad_dtype) or in that of its parameter. A segment whose
    /// gradients are all given is full. With communication streams in its calls, the run starts to
    /// reduce every full segment. Without streams it reduces them itself and waits for the other
    /// ranks, where [`Run::calls_while_given`] says so.
    ///
    /// A gradient that is not given before the step counts as zero if another rank or micro-step
    /// has given it. Else the step leaves the parameter out.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`],
    /// [`PlanError::ForeignState`]; [`PlanError::Collective`], and the state refuses further steps
    /// then.
    pub fn push_grad(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let begun = self.state.clock.begin(StepPart::Give);
        let given = give::push_grad(self, name, bytes);
        self.state.clock.end(begun);
        given
    }

    /// Says that the gradient of parameter `name` is complete in its view ([`State::grad_mut`],
    /// [`State::grad_on_device`]).
    ///
    /// Nothing is copied, and full segments are reduced as by [`Run::push_grad`]. Write all of the
    /// view first: values of an earlier gradient count where nothing has been written. The view may
    /// be written again once the step has been made. With several micro-steps to an update, the
    /// gradient is added when the micro-step ends.
    ///
    /// # Errors
    /// As [`Run::push_grad`]; [`PlanError::NotOnHost`].
    pub fn give_view(&mut self, name: &str) -> Result<()> {
        let begun = self.state.clock.begin(StepPart::Give);
        let given = give::give_view(self, name);
        self.state.clock.end(begun);
        given
    }

    /// Whether giving gradients makes calls at once and waits for the other ranks: where updates
    /// run in backward, and where segments are reduced when they are full. From the first
    /// gradient of a micro-step until [`Run::step`] ranks make no other calls then.
    pub fn calls_while_given(&self) -> bool {
        self.plan.in_backward || give::reduces_when_full(self.plan, self.comms)
    }

    /// Takes this rank's part out of the next segments whose reduction is done, without waiting.
    ///
    /// Segments that come later use their memory. Giving a gradient does so too. Returns how many
    /// segments have been started and not been taken.
    ///
    /// Below ZeRO stage 2 segments keep their memory, so nothing is taken. With shard groups
    /// nothing is taken either, since segments go on across groups when the step is made.
    ///
    /// # Errors
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn take_reduced(&mut self) -> Result<usize> {
        reduce::take_reduced(self.plan, self.state, self.backend)
    }

    /// Ends a micro-step, and at the last one reduces, updates and gathers: the stages of the plan,
    /// in order.
    ///
    /// All ranks call it, whether they have given gradients or not. Sums across ranks are formed in
    /// rank order and norms in the fixed tree, so parameters get the same bits at every ZeRO
    /// stage and with any buckets, streams and fused stages. A parameter that no rank has given
    /// a gradient, by [`Run::push_grad`] or [`State::grad_mut`], is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::Topology`]: nothing has been written.
    /// [`PlanError::Collective`], [`PlanError::Backend`]: the state refuses further steps
    /// ([`PlanError::Poisoned`]).
    /// # Cost
    /// [`Plan::traffic_bytes`](crate::Plan::traffic_bytes) of memory traffic in
    /// [`Plan::launches`](crate::Plan::launches) launches, and the calls of the plan.
    pub fn step(&mut self) -> Result<MicroStepReport> {
        timed(self, micro_step::step)
    }

    /// Makes an update from fewer micro-steps than planned, such as those left over at an epoch's
    /// end.
    ///
    /// The update takes the gradients of all micro-steps that ended since the last update. If there
    /// are none, the call does nothing. End a micro-step under way by [`Run::step`] first.
    ///
    /// # Errors
    /// As [`Run::step`]; [`PlanError::StepUnderWay`].
    pub fn flush(&mut self) -> Result<MicroStepReport> {
        timed(self, micro_step::flush)
    }

    /// Averages parameters, and state if [`crate::LocalSgd`] says so, across all ranks.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn average_now(&mut self) -> Result<()> {
        let begun = self.state.clock.begin(StepPart::Average);
        let averaged = average::average_now(self);
        self.state.clock.end(begun);
        averaged
    }

    /// Records the step of a rank on a device as a graph, its calls among the ranks included. The
    /// step is not run.
    ///
    /// All ranks call it, and compare their calls while they record them. Replays are compared no
    /// more.
    ///
    /// Gradients are written where [`State::grad_on_device`] says, or pushed, before each
    /// [`Run::replay`]. For a parameter that was given none, the values in its memory count as
    /// its gradient. Gradients given before this call are the first replay's.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] with tables in arguments ([`crate::TableKind`]). ZeRO stages 2
    /// and 3 have them there, since their gradients have no memory that stays. Likewise with
    /// several micro-steps, LocalSGD, shard groups, communication streams, or an engine that works
    /// on the host. [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn capture(&mut self) -> Result<RankGraph<'c>> {
        graph::capture(self)
    }

    /// Enqueues the recorded step once more, on all ranks, and waits for nothing.
    ///
    /// [`State::step`], loss scale and count of skipped steps are as before until
    /// [`Run::settle`]. A learning rate set since is written first.
    ///
    /// Ranks compare nothing here. A rank that replays less often than others, or is gone, keeps
    /// them waiting on their devices. [`Run::settle`] notices that after the engine's deadline.
    ///
    /// # Errors
    /// As [`RunAlone::replay`](crate::RunAlone::replay); [`PlanError::Collective`] once the
    /// communicator has failed.
    pub fn replay(&mut self, graph: &RankGraph<'c>) -> Result<()> {
        graph::replay(self, graph)
    }

    /// Waits until all ranks have done the steps that they have enqueued, and reads what the device
    /// has decided in them, as [`State::settle`]. All ranks call it.
    ///
    /// # Errors
    /// [`PlanError::Collective`] if ranks do not come before the engine's deadline;
    /// [`PlanError::Backend`].
    pub fn settle(&mut self, graph: &mut RankGraph<'c>) -> Result<()> {
        graph::settle(self, graph)
    }
}

/// Ends a micro-step by the clock of its state; an update ends there, too.
fn timed(
    run: &mut Run<'_, '_>,
    work: fn(&mut Run<'_, '_>) -> Result<MicroStepReport>,
) -> Result<MicroStepReport> {
    let begun = run.state.clock.begin(StepPart::Rest);
    let done = work(run);
    run.state.clock.end(begun);
    if matches!(&done, Ok(report) if report.update.is_some()) {
        run.state.clock.end_update();
    }
    done
}
