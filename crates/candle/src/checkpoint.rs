//! Checkpoints of model, optimizer, position in the run and texts that the caller wants remembered.

use std::path::Path;

use fusestep_checkpoint::Checkpoints;
#[cfg(doc)]
use fusestep_planner::PlanError;

use crate::fused::Tensors;
use crate::lend::KeptByCandle;
use crate::{AdapterError, Fused, Params};

/// Checkpoints, which all ranks save and resume together.
impl<P: Params> Fused<'_, P> {
    /// Resumes from the folder's checkpoint, which any number of ranks may have saved: variables,
    /// the optimizer's state and remembered texts. Returns the number of steps that the caller had
    /// done, 0 if there is no checkpoint.
    ///
    /// # Errors
    /// An [`AdapterError`]: variables without names, or a checkpoint that is damaged or of another
    /// model or rule. Nothing has changed then. The error names the tensors that differ.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> candle_core::Result<usize> {
        self.names.check()?;
        let resumed = self.try_resume(folder.as_ref());
        self.note(resumed)
    }

    fn try_resume(&mut self, folder: &Path) -> Result<usize, AdapterError> {
        if let Tensors::Borrowed { .. } = &self.tensors {
            let resumed = self.session.resume_borrowed(folder, &KeptByCandle(&self.vars))?;
            return Ok(resumed.unwrap_or(0));
        }
        match self.session.resume_if_any(folder)? {
            None => Ok(0),
            Some(steps) => {
                self.session.meet()?;
                self.set_variables()?;
                Ok(steps)
            }
        }
    }

    /// Begins a save after every `every` steps; `step` counts from 0 and has just been done.
    /// Returns whether it has begun a save.
    ///
    /// Variables and state are copied before it returns, each rank's own shard, and written while
    /// training goes on. The next call returns an error of writing, on all ranks alike: a step, a
    /// save, or [`Fused::finish_saves`].
    ///
    /// # Errors
    /// As [`Fused::save_checkpoint`]; the error of the save before; [`PlanError::SaveEvery0`].
    /// # Cost
    /// One copy of variables and state, after a wait for the save before if that is not complete.
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> candle_core::Result<bool> {
        self.names.check()?;
        let due = Checkpoints::due(every, step).map_err(AdapterError::from);
        let begun = due.and_then(|due| match due {
            Some(steps) => self.begin_save(folder.as_ref(), steps).map(|()| true),
            None => Ok(false),
        });
        self.note(begun)
    }

    /// Saves variables, state, remembered texts and `steps`, the number of steps that the caller
    /// has done, and waits for the save. The checkpoint before stays until this one is complete.
    /// The model is `model.safetensors` in the folder that `manifest.json` names as its generation.
    ///
    /// # Errors
    /// An [`AdapterError`]: variables without names, another run that saves to the folder, or a
    /// failed write. The checkpoint before is as it was then.
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
    ) -> candle_core::Result<()> {
        self.names.check()?;
        let saved = self.begin_save(folder.as_ref(), steps);
        let saved = saved.and_then(|()| Ok(self.session.finish_saves()?));
        self.note(saved)
    }

    fn begin_save(&mut self, folder: &Path, steps: usize) -> Result<(), AdapterError> {
        if let Tensors::Borrowed { .. } = &self.tensors {
            if self.vars.iter().any(|(name, _)| name == "__metadata__") {
                return Err(AdapterError::MetadataName);
            }
            let params = KeptByCandle(&self.vars);
            return Ok(self.session.begin_save_borrowed(folder, steps, &params)?);
        }
        Ok(self.session.begin_save(folder, steps)?)
    }

    /// Waits until no save is in flight on any rank.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> candle_core::Result<()> {
        let finished = self.session.finish_saves();
        self.note(finished.map_err(AdapterError::from))
    }

    /// Stores a text in every checkpoint from the next one on, such as a serialized random
    /// generator. Each rank has texts of its own. They come back on as many ranks, and on another
    /// number of ranks only if all had the same.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.session.remember(name, text);
    }

    /// A text of this rank that [`remember`](Self::remember) has set, or that the resumed
    /// checkpoint has brought.
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.session.remembered(name)
    }
}
