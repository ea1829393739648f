//! Checkpoints of an optimizer: begun, waited for and gone on from.

use std::path::Path;

use fusestep_launch::Backend;
use fusestep_planner::{Checkpoints, Comms, Initial, Plan, PlanError, RunToSave, State};

use super::FusedOptimizer;
use crate::Error;

impl FusedOptimizer<'_> {
    /// Goes on from the folder's checkpoint, of however many ranks; returns how many steps the
    /// caller had done, 0 if there is none.
    ///
    /// # Errors
    /// As [`Plan::load`]; that of a save that is under way.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> Result<usize, Error> {
        let folder = folder.as_ref();
        let resumed = self.with_checkpoints(|checkpoints, plan, state, backend, comms| {
            checkpoints.resume(plan, (state, backend), None, (comms, folder))
        })?;
        if resumed.is_some() {
            (self.met, self.brings) = (false, Initial::OwnAndEqual);
        }
        Ok(resumed.unwrap_or(0))
    }

    /// Begins a save after every so many steps; `step` counts from 0 and has just been done. Says
    /// whether it has begun one.
    ///
    /// Parameters and state are copied before it returns, and written while training goes on. What
    /// goes wrong then is an error of the next call, on all ranks alike: of a step, of a save, or
    /// of [`FusedOptimizer::finish_saves`].
    ///
    /// # Errors
    /// As [`FusedOptimizer::save`]; that of the save before; `every` 0, which would save nothing.
    /// # Cost
    /// One copy of what this rank saves; until the save before is complete, if it is not.
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> Result<bool, Error> {
        if every == 0 {
            let expected = "checkpoint_every: expected a save after every 1 step or more, found 0; \
                            leave the call out to save nothing";
            return Err(expected.into());
        }
        let steps = step.saturating_add(1);
        let due = steps.is_multiple_of(every);
        if due {
            self.begin_save(folder.as_ref(), steps)?;
        }
        Ok(due)
    }

    /// Saves parameters, state, what is remembered and that the caller has done `steps` steps, and
    /// waits for it; the checkpoint before stays until this one is complete. Its parameters are
    /// `model.safetensors` in the folder that `manifest.json` names as its generation.
    ///
    /// # Errors
    /// As [`Plan::save`]; as [`Plan::handshake`]; another run that saves to the same folder.
    pub fn save(&mut self, folder: impl AsRef<Path>, steps: usize) -> Result<(), Error> {
        self.begin_save(folder.as_ref(), steps)?;
        self.finish_saves()
    }

    /// Waits until nothing is being saved on any rank; at the end of training, so that an error is
    /// heard of. Dropping the optimizer waits as well.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> Result<(), Error> {
        self.tell_of_save()?;
        if !self.checkpoints.in_flight() {
            return Ok(());
        }
        self.with_checkpoints(|checkpoints, plan, _, _, comms| checkpoints.finish(plan, comms))?;
        Ok(())
    }

    /// Keeps a text in every checkpoint from the next one on, such as a serialized random
    /// generator. Each rank has its own; they come back on as many ranks, and on another number
    /// only if they were the same on all.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.checkpoints.remembered_mut().set(name, text);
    }

    /// A text that was remembered: here, or in the checkpoint that was resumed.
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.checkpoints.remembered().get(name)
    }

    fn begin_save(&mut self, folder: &Path, steps: usize) -> Result<(), Error> {
        self.tell_of_save()?;
        self.meet()?;
        self.with_checkpoints(|checkpoints, plan, state, backend, comms| {
            let run = RunToSave { state, backend, params: None };
            checkpoints.begin(plan, run, comms, (folder, steps))
        })
    }

    /// Passes on what a step has heard of a save.
    pub(super) fn tell_of_save(&mut self) -> Result<(), Error> {
        self.untold.take().map_or(Ok(()), Err)
    }

    /// Hears of a save that has failed.
    pub(super) fn look_after_saves(&mut self) -> Result<(), Error> {
        if self.checkpoints.in_flight() {
            self.with_checkpoints(|checkpoints, plan, _, _, comms| checkpoints.poll(plan, comms))?;
        }
        Ok(())
    }

    /// [`FusedOptimizer::with`] that has the checkpoints at hand, too.
    fn with_checkpoints<R>(
        &mut self,
        work: impl FnOnce(
            &mut Checkpoints,
            &Plan,
            &mut State,
            &dyn Backend,
            &mut Comms<'_>,
        ) -> Result<R, PlanError>,
    ) -> Result<R, Error> {
        let mut checkpoints = std::mem::take(&mut self.checkpoints);
        let done = self.with(|plan, state, backend, comms| {
            work(&mut checkpoints, plan, state, backend, comms)
        });
        self.checkpoints = checkpoints;
        // All ranks have made this call, so none is behind an earlier error any more.
        self.failed &= done.is_err();
        done
    }
}

impl Drop for FusedOptimizer<'_> {
    /// Completes the save in flight with the other ranks, unless a call has failed: then they may
    /// be anywhere.
    fn drop(&mut self) {
        if !self.failed && !std::thread::panicking() {
            let _ = self.finish_saves();
        }
    }
}
