//! Checkpoints of a session: begun, waited for and gone on from.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_checkpoint::{Checkpoints, Saved, load_state};
use fusestep_planner::{BorrowedParams, Initial, PlanError, RunToLoad, RunToSave};
#[cfg(doc)]
use fusestep_planner::{Run, State};

use super::Session;
use super::saving::Saving;

impl Session<'_> {
    /// Goes on from the folder's checkpoint, of however many ranks; returns how many steps the
    /// caller had done, 0 if there is none.
    ///
    /// # Errors
    /// As [`Checkpoints::resume`]; that of a save that is under way.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> Result<usize, PlanError> {
        Ok(self.resume_if_any(folder)?.unwrap_or(0))
    }

    /// [`Session::resume`] that says `None` if there is no checkpoint.
    ///
    /// # Errors
    /// As [`Session::resume`].
    pub fn resume_if_any(&mut self, folder: impl AsRef<Path>) -> Result<Option<usize>, PlanError> {
        self.resume_with(folder, Checkpoints::steps_of)
    }

    /// [`Session::resume_if_any`] with the texts that [`Session::begin_save_with`] has saved, once
    /// `check` has made something of them. Returns that.
    ///
    /// # Errors
    /// As [`Session::resume`]; those of `check`, before anything is written.
    pub fn resume_with<T>(
        &mut self,
        folder: impl AsRef<Path>,
        check: impl Fn(&Path, &BTreeMap<String, String>) -> Result<T, PlanError>,
    ) -> Result<Option<T>, PlanError> {
        self.resume_into(folder.as_ref(), None, check)
    }

    /// [`Session::resume_if_any`] into parameters that are lent for the call.
    ///
    /// # Errors
    /// As [`Session::resume`].
    pub fn resume_borrowed(
        &mut self,
        folder: impl AsRef<Path>,
        params: &dyn BorrowedParams,
    ) -> Result<Option<usize>, PlanError> {
        self.resume_into(folder.as_ref(), Some(params), Checkpoints::steps_of)
    }

    /// [`Session::resume_with`], into parameters that are lent or kept.
    fn resume_into<T>(
        &mut self,
        folder: &Path,
        params: Option<&dyn BorrowedParams>,
        check: impl Fn(&Path, &BTreeMap<String, String>) -> Result<T, PlanError>,
    ) -> Result<Option<T>, PlanError> {
        if self.is_saving() {
            self.saving.finish()?;
        }
        let Saving { plan, comms, checkpoints, .. } = &mut self.saving;
        let backend = self.backend.as_ref();
        let run = RunToLoad { plan, state: &mut self.state, backend, params };
        let resumed = checkpoints.resume_with(run, comms, folder, check);
        let resumed = self.saving.noted_by_all(resumed)?;
        if resumed.is_some() {
            (self.met, self.brings) = (false, Initial::OwnAndEqual);
        }
        Ok(resumed.map(|(checked, _)| checked))
    }

    /// Begins a save after every so many steps; `step` counts from 0 and has just been done. Says
    /// whether it has begun one.
    ///
    /// # Errors
    /// As [`Session::begin_save`]; [`PlanError::SaveEvery0`], which would save nothing.
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> Result<bool, PlanError> {
        match Checkpoints::due(every, step)? {
            Some(steps) => self.begin_save(folder, steps).map(|()| true),
            None => Ok(false),
        }
    }

    /// Saves parameters, state, what is remembered and that the caller has done `steps` steps, and
    /// waits for it; the checkpoint before stays until this one is complete. Its parameters are
    /// `model.safetensors` in the folder that `manifest.json` names as its generation.
    ///
    /// # Errors
    /// As [`Session::begin_save`].
    pub fn save(&mut self, folder: impl AsRef<Path>, steps: usize) -> Result<(), PlanError> {
        self.begin_save(folder, steps)?;
        self.finish_saves()
    }

    /// Begins a save of a run whose caller has done `steps` steps.
    ///
    /// Parameters and state are copied before it returns, and written while training goes on. What
    /// goes wrong then is an error of the next call, on all ranks alike: of a step, of a save, or
    /// of [`Session::finish_saves`].
    ///
    /// # Errors
    /// As [`Checkpoints::begin`]; as [`Run::handshake`]; that of the save before.
    /// # Cost
    /// One copy of what this rank saves; until the save before is complete, if it is not.
    pub fn begin_save(&mut self, folder: impl AsRef<Path>, steps: usize) -> Result<(), PlanError> {
        self.begin_save_with(folder, Checkpoints::texts_of(steps))
    }

    /// [`Session::begin_save`] with texts of the program's own in place of a number of steps.
    ///
    /// # Errors
    /// As [`Session::begin_save`].
    pub fn begin_save_with(
        &mut self,
        folder: impl AsRef<Path>,
        texts: BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        self.begin_save_of(folder.as_ref(), None, texts)
    }

    /// [`Session::begin_save`] of parameters that are lent for the call.
    ///
    /// # Errors
    /// As [`Session::begin_save`].
    pub fn begin_save_borrowed(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
        params: &dyn BorrowedParams,
    ) -> Result<(), PlanError> {
        self.begin_save_of(folder.as_ref(), Some(params), Checkpoints::texts_of(steps))
    }

    /// [`Session::begin_save_with`], of parameters that are lent or kept.
    fn begin_save_of(
        &mut self,
        folder: &Path,
        params: Option<&dyn BorrowedParams>,
        texts: BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        self.finish_saves()?;
        self.meet()?;
        let Saving { plan, comms, checkpoints, .. } = &mut self.saving;
        let run = RunToSave { plan, state: &self.state, backend: self.backend.as_ref(), params };
        let begun = checkpoints.begin_with(run, comms, folder, texts);
        self.saving.noted_by_all(begun)
    }

    /// Reads a file that [`save_state`](fusestep_checkpoint::save_state) wrote: the rule's own
    /// tensors and the counts of steps.
    ///
    /// # Errors
    /// As [`load_state`]; nothing has changed then.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<(), PlanError> {
        let loaded = load_state(&mut self.state, self.backend.as_ref(), path.as_ref());
        self.saving.noted(loaded)?;
        self.meet_again();
        Ok(())
    }

    /// Makes the folder of the saves to come and takes its lock, so that another run that saves
    /// there is found before anything is trained.
    ///
    /// # Errors
    /// As [`Checkpoints::own_folder`].
    pub fn own_folder(&mut self, folder: impl AsRef<Path>) -> Result<(), PlanError> {
        let Saving { comms, checkpoints, .. } = &mut self.saving;
        let owned = checkpoints.own_folder(comms, folder.as_ref());
        self.saving.noted_by_all(owned)
    }

    /// Tensors with values that are infinite or NaN in what this rank has written of the last save.
    pub fn non_finite(&self) -> &[String] {
        self.saving.checkpoints.non_finite()
    }

    /// Waits until nothing is being saved on any rank; at the end of training, so that an error is
    /// heard of. Dropping the session waits as well.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> Result<(), PlanError> {
        self.tell_of_save()?;
        if self.saving.checkpoints.in_flight() { self.saving.finish() } else { Ok(()) }
    }

    /// This session with other checkpoints for its saves, such as those of a simulated disk. Call
    /// it before the first save and before texts are remembered.
    pub fn saving_to(mut self, checkpoints: Checkpoints) -> Self {
        self.saving.checkpoints = checkpoints;
        self
    }

    /// Takes over the saves and texts of another session of this process, which has none after.
    pub fn take_checkpoints_of(&mut self, other: &mut Session<'_>) {
        self.saving.checkpoints = std::mem::take(&mut other.saving.checkpoints);
        self.saving.saved = other.saving.saved.take();
    }

    /// A save that has been completed since this was last asked, by a step, another save, a
    /// resume or [`Session::finish_saves`]: from now on a run resumes from it, or from a later one.
    pub fn take_saved(&mut self) -> Option<Saved> {
        self.saving.saved.take()
    }

    /// Whether a save is being written.
    pub fn is_saving(&self) -> bool {
        self.saving.checkpoints.in_flight()
    }

    /// Keeps a text in every checkpoint from the next one on, such as a serialized random
    /// generator. Each rank has its own; they come back on as many ranks, and on another number
    /// only if they were the same on all.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.saving.checkpoints.remembered_mut().set(name, text);
    }

    /// A text that was remembered: here, or in the checkpoint that was resumed.
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.saving.checkpoints.remembered().get(name)
    }

    /// Passes on what a step has heard of a save.
    pub(super) fn tell_of_save(&mut self) -> Result<(), PlanError> {
        self.saving.untold.take().map_or(Ok(()), Err)
    }

    /// Hears of a save that has failed.
    pub(super) fn look_after_saves(&mut self) -> Result<(), PlanError> {
        // With lanes ranks make different numbers of micro-steps, so they look once an update.
        let within = self.plan().lanes().is_some() && self.state.micro_steps() > 0;
        if self.saving.checkpoints.in_flight() && !within {
            self.saving.poll()?;
        }
        Ok(())
    }
}
