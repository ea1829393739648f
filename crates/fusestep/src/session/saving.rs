//! A session's saves, which its end completes.

use fusestep_checkpoint::{Checkpoints, Saved};
use fusestep_planner::{Comms, Plan, PlanError};

/// Plan, calls and saves of a session.
pub(super) struct Saving<'c> {
    pub(super) plan: Plan,
    pub(super) comms: Comms<'c>,
    pub(super) checkpoints: Checkpoints,
    /// A save that has been completed and not been told of.
    pub(super) saved: Option<Saved>,
    /// Error of a save, heard of behind a step.
    pub(super) untold: Option<PlanError>,
    /// Text of the first failure that other ranks may not know of.
    pub(super) failed: Option<String>,
}

impl<'c> Saving<'c> {
    pub(super) fn new(plan: Plan, comms: Comms<'c>, checkpoints: Checkpoints) -> Self {
        Self { plan, comms, checkpoints, saved: None, untold: None, failed: None }
    }

    /// Passes on an outcome and remembers a failure: other ranks may wait elsewhere. One of a
    /// checkpoint comes on all of them in the same call.
    pub(super) fn noted<R>(&mut self, done: Result<R, PlanError>) -> Result<R, PlanError> {
        if let Err(error) = &done
            && !error.is_of_checkpoint()
            && self.plan.topology().world > 1
        {
            self.failed.get_or_insert_with(|| error.to_string());
        }
        done
    }

    /// [`Saving::noted`] of a call of checkpoints. All ranks have made it, so none is behind an
    /// earlier failure any more.
    pub(super) fn noted_by_all<R>(&mut self, done: Result<R, PlanError>) -> Result<R, PlanError> {
        let done = self.noted(done)?;
        self.failed = None;
        Ok(done)
    }

    /// Waits for the save in flight; all ranks do.
    pub(super) fn finish(&mut self) -> Result<(), PlanError> {
        let finished = self.checkpoints.finish(&mut self.comms);
        self.heard(finished)
    }

    /// Hears of the save in flight without waiting for it; all ranks do.
    pub(super) fn poll(&mut self) -> Result<(), PlanError> {
        let polled = self.checkpoints.poll(&mut self.comms);
        self.heard(polled)
    }

    fn heard(&mut self, done: Result<Option<Saved>, PlanError>) -> Result<(), PlanError> {
        if let Some(saved) = self.noted_by_all(done)? {
            self.saved = Some(saved);
        }
        Ok(())
    }
}

impl Drop for Saving<'_> {
    /// Completes the save in flight with the other ranks, unless a call has failed: then they may
    /// be anywhere.
    fn drop(&mut self) {
        if self.failed.is_none() && !std::thread::panicking() && self.checkpoints.in_flight() {
            let _ = self.finish();
        }
    }
}
