//! Steps on borrowed tensors that are enqueued, and concluded later.

use fusestep_launch::{CONTROL_BYTES, ControlBlock, SquareSum};

use crate::error::Result;
use crate::plan::value::Plan;
use crate::run::alone::{self, RunAlone};
use crate::run::clock::StepPart;
use crate::run::executor::{Brought, Executor, Lender};
use crate::run::memory::state::State;
use crate::run::memory::units::Begun;
use crate::run::report::StepReport;
use crate::run::stages::{norm, optimize};
use crate::run::step;

/// A step on borrowed tensors whose work is enqueued and whose outcome the host has not seen.
///
/// The state counts the step when it is concluded. Until then it takes no other step, and what it
/// says of steps and loss scales is as before.
pub struct EnqueuedStep {
    begun: Begun,
    /// The control block of the step; `None` in a step without one.
    control: Option<Box<dyn Brought>>,
}

impl EnqueuedStep {
    /// Whether the outcome is known already: nobody skips the step of a plan that reads no
    /// gradients, unless the lender has a control block.
    pub fn is_known(&self) -> bool {
        self.control.is_none()
    }
}

impl std::fmt::Debug for EnqueuedStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnqueuedStep").field("report", &self.begun.report).finish_non_exhaustive()
    }
}

impl RunAlone<'_> {
    /// Enqueues one step on tensors that `lender` lends. Nothing is waited for on a device that
    /// [brings](Lender::bring) bytes later; [`RunAlone::conclude`] waits for this step's outcome.
    ///
    /// # Errors
    /// As [`RunAlone::step_borrowed`].
    pub fn enqueue_borrowed(&mut self, lender: &mut dyn Lender) -> Result<EnqueuedStep> {
        let begun = self.state.clock.begin(StepPart::Rest);
        let enqueued = enqueue(self.plan, self.state, lender);
        alone::end(self.state, begun);
        enqueued
    }

    /// Reads the outcome of the step that was enqueued last, and counts the step unless it was
    /// skipped.
    ///
    /// # Errors
    /// [`PlanError::Backend`](crate::PlanError::Backend), and the state refuses further steps then.
    pub fn conclude(&mut self, enqueued: EnqueuedStep) -> Result<StepReport> {
        let EnqueuedStep { mut begun, control } = enqueued;
        if let Some(control) = control {
            let bytes = self.state.or_poison(control.wait())?;
            let block: ControlBlock = bytemuck::pod_read_unaligned(&bytes);
            match &mut self.state.norm {
                Some(norm) => norm.take(block),
                None => begun.report.skipped = block.found != 0,
            }
        }
        step::count_update(self.state, self.backend, begun)
    }

    /// Reads the gradients that `lender` lends and returns the sum of squares of each, in plan
    /// order, for a step that decides by more gradients than its own; waits for a device. Then
    /// [`State::give_squares`] takes those of all, and the step does not read its own again.
    ///
    /// # Errors
    /// As [`RunAlone::step_borrowed`]; the state takes further steps.
    pub fn squares_borrowed(&mut self, lender: &mut dyn Lender) -> Result<Vec<SquareSum>> {
        step::check_alone(self.plan, self.state)?;
        optimize::refresh(self.plan, self.state)?;
        let mut executor = Executor::Lender(lender);
        let read = norm::read(self.plan, self.state, &mut executor);
        self.state.forget_without_gradient();
        read?;
        match &self.state.norm {
            Some(norm) => norm.tensor_squares(executor.backend()),
            None => Ok(Vec::new()),
        }
    }

    /// Enqueues the launches of one step while a framework records them, and counts none: the step
    /// is taken by replays of the recording, which [`RunAlone::follow_replays`] hears of.
    ///
    /// # Errors
    /// As [`RunAlone::step_borrowed`]; the state takes further steps, since nothing has run.
    pub fn record_borrowed(&mut self, lender: &mut dyn Lender) -> Result<()> {
        step::check_alone(self.plan, self.state)?;
        let mut executor = Executor::Lender(lender);
        let mut begun = step::begin_update(self.plan, self.state, &executor)?;
        let done = step::each_stage(self.plan, self.state, &mut executor, None, &mut begun.report);
        self.state.forget_without_gradient();
        done
    }

    /// Takes over what replays of a recorded step have done: the steps that each parameter has
    /// taken by now, in plan order, and what the control block says. Waits for a device.
    ///
    /// # Errors
    /// [`PlanError::Backend`](crate::PlanError::Backend).
    /// # Panics
    /// As [`State::set_steps`].
    pub fn follow_replays(
        &mut self,
        steps: impl ExactSizeIterator<Item = u64> + Clone,
    ) -> Result<StepReport> {
        let state = &mut *self.state;
        if let Some(norm) = &mut state.norm {
            norm.settle(self.backend, 0)?;
        }
        state.set_steps(steps);
        let block = state.norm.as_ref().map(|norm| norm.block);
        Ok(StepReport {
            step: state.step,
            grad_norm: block.map(|block| block.grad_norm),
            non_finite: block.map_or(0, |block| block.non_finite),
            skipped: block.is_some_and(|block| block.found != 0),
            loss_scale: state.loss_scale().map(|scale| scale.scale()),
            ..StepReport::default()
        })
    }
}

fn enqueue(plan: &Plan, state: &mut State, lender: &mut dyn Lender) -> Result<EnqueuedStep> {
    step::check_alone(plan, state)?;
    let mut executor = Executor::Lender(lender);
    let mut begun = step::begin_update(plan, state, &executor)?;
    let done = step::each_stage(plan, state, &mut executor, None, &mut begun.report);
    state.or_poison(done)?;
    let brought = match (&state.norm, executor) {
        (Some(norm), Executor::Lender(lender)) => {
            lender.bring(norm.control.as_ref(), CONTROL_BYTES).map(Some)
        }
        (None, Executor::Lender(lender)) => lender.bring_control(),
        (_, Executor::Backend(_)) => Ok(None),
    };
    Ok(EnqueuedStep { begun, control: state.or_poison(brought)? })
}
