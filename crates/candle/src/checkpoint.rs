//! Checkpoints of model, optimizer, position in the run and texts that the caller wants remembered.

use std::path::Path;

#[cfg(doc)]
use fusestep_planner::PlanError;
use fusestep_planner::{Checkpoints, Comms, RunToLoad, RunToSave};

use crate::lend::KeptByCandle;
use crate::{AdapterError, Fused, Params, Ranked, Solo};

impl<P: Params> Fused<P> {
    /// Resumes from the folder's checkpoint, which any number of ranks may have saved: variables,
    /// the optimizer's state and remembered texts. Returns the number of steps that the caller had
    /// done, 0 if there is no checkpoint.
    ///
    /// # Errors
    /// An [`AdapterError`]: variables without names, or a checkpoint that is damaged or of another
    /// model or rule. Nothing has changed then. The error names the tensors that differ.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> candle_core::Result<usize> {
        self.names.check()?;
        let mut solo = Solo::new();
        let mut comms = Comms::direct(&mut solo);
        let run = RunToLoad {
            state: &mut self.state,
            backend: self.memory.backend(),
            params: Some(&KeptByCandle(&self.vars)),
        };
        let resumed = self.checkpoints.resume(&self.plan, run, &mut comms, folder.as_ref());
        Ok(resumed.map_err(AdapterError::from)?.unwrap_or(0))
    }

    /// Begins a save after every `every` steps; `step` counts from 0 and has just been done.
    /// Returns whether it has begun a save.
    ///
    /// Variables and state are copied before it returns, and written while training goes on. The
    /// next call returns an error of writing: a step, a save, or [`Fused::finish_saves`].
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
        let Some(steps) = Checkpoints::due(every, step).map_err(AdapterError::from)? else {
            return Ok(false);
        };
        self.begin_save(folder.as_ref(), steps)?;
        Ok(true)
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
        self.begin_save(folder.as_ref(), steps)?;
        self.finish_saves()
    }

    /// Waits until no save is in flight.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> candle_core::Result<()> {
        let mut solo = Solo::new();
        let done = self.checkpoints.finish(&self.plan, &mut Comms::direct(&mut solo));
        done.map_err(AdapterError::from)?;
        Ok(())
    }

    /// Stores a text in every checkpoint from the next one on, such as a serialized random
    /// generator.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.checkpoints.remembered_mut().set(name, text);
    }

    /// A text that [`remember`](Self::remember) has set, or that the resumed checkpoint has
    /// brought.
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.checkpoints.remembered().get(name)
    }

    fn begin_save(&mut self, folder: &Path, steps: usize) -> candle_core::Result<()> {
        self.names.check()?;
        if self.vars.iter().any(|(name, _)| name == "__metadata__") {
            Err(AdapterError::MetadataName)?;
        }
        let mut solo = Solo::new();
        let run = RunToSave {
            state: &self.state,
            backend: self.memory.backend(),
            params: Some(&KeptByCandle(&self.vars)),
        };
        let mut comms = Comms::direct(&mut solo);
        let begun = self.checkpoints.begin(&self.plan, run, &mut comms, folder, steps);
        Ok(begun.map_err(AdapterError::from)?)
    }

    /// Advances the save in flight and returns its error, if it has failed.
    pub(crate) fn look_after_saves(&mut self) -> candle_core::Result<()> {
        if self.checkpoints.in_flight() {
            let mut solo = Solo::new();
            let mut comms = Comms::direct(&mut solo);
            let polled = self.checkpoints.poll(&self.plan, &mut comms);
            polled.map_err(AdapterError::from)?;
        }
        Ok(())
    }
}

/// Checkpoints, which all ranks save and resume together.
impl<P: Params> Ranked<'_, P> {
    /// Resumes as [`Fused::resume`] does. The checkpoint may be of another number of ranks.
    ///
    /// # Errors
    /// As [`Fused::resume`].
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> candle_core::Result<usize> {
        self.names.check()?;
        let resumed = self.try_resume(folder.as_ref());
        self.note(resumed)
    }

    fn try_resume(&mut self, folder: &Path) -> Result<usize, AdapterError> {
        match self.session.resume_if_any(folder)? {
            None => Ok(0),
            Some(steps) => {
                self.session.meet()?;
                self.set_variables()?;
                Ok(steps)
            }
        }
    }

    /// Begins a save after every `every` steps, as [`Fused::checkpoint_every`] does. Every rank
    /// copies its own shard and writes it while training goes on. All ranks return an error in the
    /// same call.
    ///
    /// # Errors
    /// As [`Fused::checkpoint_every`].
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> candle_core::Result<bool> {
        self.names.check()?;
        let begun = self.session.checkpoint_every(every, folder, step);
        self.note(begun.map_err(AdapterError::from))
    }

    /// Saves a checkpoint and waits for it, as [`Fused::save_checkpoint`] does.
    ///
    /// # Errors
    /// As [`Fused::save_checkpoint`].
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
    ) -> candle_core::Result<()> {
        self.names.check()?;
        let saved = self.session.save(folder, steps);
        self.note(saved.map_err(AdapterError::from))
    }

    /// Waits until no save is in flight on any rank.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> candle_core::Result<()> {
        let finished = self.session.finish_saves();
        self.note(finished.map_err(AdapterError::from))
    }

    /// Stores a text in every checkpoint, as [`Fused::remember`] does; each rank has texts of its
    /// own. They come back on as many ranks, and on another number of ranks only if all had the
    /// same.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.session.remember(name, text);
    }

    /// A text of this rank that was remembered, as [`Fused::remembered`].
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.session.remembered(name)
    }
}
