//! Sessions of one process whose tensors stay with a framework, which lends them for each call.

use std::path::Path;

use fusestep_planner::{
    BorrowedParams, Checkpoints, Lender, PlanError, StepReport, Tensors, Topology,
};
use fusestep_tensor::ParamDesc;

use super::start::described;
use super::{Session, SessionError};
use crate::{Device, StepOptions};

/// Tensors that stay with a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lent {
    /// Parameters and gradients; the session keeps the rule's own tensors.
    Params,
    /// The rule's own tensors, too; the session keeps counts of steps.
    ParamsAndState,
}

impl Session<'_> {
    /// The session of a process whose tensors stay where a framework has them;
    /// [`Session::step_lent`] updates them there. There may be no parameter.
    ///
    /// Before the first step the program asks itself whether this process was started to be one of
    /// many ([`require_alone`](fusestep_collective::require_alone)).
    ///
    /// # Errors
    /// As [`Session::new`], but for [`SessionError::TakenForWhole`]; a setting that takes tensors
    /// of the session's own ([`StepOptions::check_borrowed`]).
    pub fn borrowing(
        options: &StepOptions,
        params: &[ParamDesc],
        mut device: Box<dyn Device>,
        lent: Lent,
    ) -> Result<Self, SessionError> {
        options.check_borrowed()?;
        let params = described(options, params)?;
        let mut chosen = options.chosen(&params, Topology::SOLO, device.limits())?;
        chosen.note(options.figures.as_ref().and_then(|figures| device.choose(figures)));
        let planner = chosen.planner(&params, Topology::SOLO, device.limits())?;
        let tensors = match lent {
            Lent::Params => Tensors::Borrowed,
            Lent::ParamsAndState => Tensors::BorrowedWithState,
        };
        Self::of_one(options, planner.tensors(tensors), &params, device)
    }

    /// One step on tensors that `lender` lends.
    ///
    /// # Errors
    /// That of a save, before the step: call it again. As [`Plan::run_borrowed`].
    ///
    /// [`Plan::run_borrowed`]: fusestep_planner::Plan::run_borrowed
    pub fn step_lent(&mut self, lender: &mut dyn Lender) -> Result<StepReport, PlanError> {
        self.tell_of_save()?;
        self.look_after_saves()?;
        self.attempt(|run| run.plan.run_borrowed(run.state, lender))
    }

    /// Lets the f32 master of a lent parameter follow values that were written outside of a step,
    /// where it does not round to them.
    ///
    /// # Errors
    /// As [`State::follow_borrowed`](fusestep_planner::State::follow_borrowed).
    pub fn follow_lent(&mut self, name: &str, bytes: &[u8]) -> Result<(), PlanError> {
        self.attempt(|run| run.state.follow_borrowed(run.backend, name, bytes))
    }

    /// Turns the values of a lent parameter into those for evaluation, in `bytes`.
    ///
    /// # Errors
    /// As [`State::average_borrowed`](fusestep_planner::State::average_borrowed).
    pub fn average_lent(&self, name: &str, bytes: &mut [u8]) -> Result<(), PlanError> {
        self.state.average_borrowed(self.backend(), name, bytes)
    }

    /// [`Session::resume_if_any`] into parameters that are lent for the call.
    ///
    /// # Errors
    /// As [`Session::resume`].
    pub fn resume_lent(
        &mut self,
        folder: impl AsRef<Path>,
        params: &dyn BorrowedParams,
    ) -> Result<Option<usize>, PlanError> {
        self.resume_into(folder.as_ref(), Some(params), Checkpoints::steps_of)
    }

    /// [`Session::begin_save`] of parameters that are lent for the call.
    ///
    /// # Errors
    /// As [`Session::begin_save`].
    pub fn begin_save_lent(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
        params: &dyn BorrowedParams,
    ) -> Result<(), PlanError> {
        self.begin_save_of(folder.as_ref(), Some(params), Checkpoints::texts_of(steps))
    }
}
