//! Steps on borrowed tensors that are enqueued, and concluded later.

use fusestep_launch::CONTROL_BYTES;

use crate::error::Result;
use crate::plan::value::Plan;
use crate::run::alone::{self, RunAlone};
use crate::run::clock::StepPart;
use crate::run::executor::{Brought, Executor, Lender};
use crate::run::memory::state::State;
use crate::run::memory::units::Begun;
use crate::run::report::StepReport;
use crate::run::step;

/// A step on borrowed tensors whose work is enqueued and whose outcome the host has not seen.
///
/// The state counts the step when it is concluded. Until then it takes no other step, and what it
/// says of steps and loss scales is as before.
pub struct EnqueuedStep {
    begun: Begun,
    /// The control block of the step; `None` in a plan without one.
    control: Option<Box<dyn Brought>>,
}

impl EnqueuedStep {
    /// Whether the outcome is known already: in a plan that reads no gradients no step is skipped.
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
        let EnqueuedStep { begun, control } = enqueued;
        if let Some(control) = control {
            let bytes = self.state.or_poison(control.wait())?;
            if let Some(norm) = &mut self.state.norm {
                norm.take(bytemuck::pod_read_unaligned(&bytes));
            }
        }
        step::count_update(self.state, self.backend, begun)
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
        _ => Ok(None),
    };
    Ok(EnqueuedStep { begun, control: state.or_poison(brought)? })
}
