//! One checkpoint of model, optimizer, position and what the caller wants remembered.

use std::path::Path;

use fusestep_planner::{Comms, RunToSave};

use crate::lend::KeptByCandle;
use crate::{AdapterError, Fused, Params, Ranked, Solo};

impl<P: Params> Fused<P> {
    /// Goes on from the folder's checkpoint, of however many ranks: variables, the optimizer's
    /// state and what was remembered; returns how many steps the caller had done, 0 if there is no
    /// checkpoint.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, or a checkpoint that is damaged or of another model or rule,
    /// named tensor by tensor; nothing has changed then.
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> candle_core::Result<usize> {
        self.names.check()?;
        let mut solo = Solo::new();
        let mut comms = Comms::direct(&mut solo);
        let resumed = self.checkpoints.resume(
            &self.plan,
            (&mut self.state, self.memory.backend()),
            Some(&KeptByCandle(&self.vars)),
            (&mut comms, folder.as_ref()),
        );
        Ok(resumed.map_err(AdapterError::from)?.unwrap_or(0))
    }

    /// Begins a save after every so many steps; `step` counts from 0 and has just been done. Says
    /// whether it has begun one.
    ///
    /// Variables and state are copied before it returns, and written while training goes on. What
    /// goes wrong then is the next call's error: of a step, of a save, or of
    /// [`Fused::finish_saves`].
    ///
    /// # Errors
    /// As [`Fused::save_checkpoint`]; that of the save before; [`AdapterError::SaveEvery0`].
    /// # Cost
    /// One copy of variables and state; until the save before is complete, if it is not.
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> candle_core::Result<bool> {
        let Some(steps) = due(every, step)? else {
            return Ok(false);
        };
        self.begin_save(folder.as_ref(), steps)?;
        Ok(true)
    }

    /// Saves variables, state, what is remembered and that the caller has done `steps` steps, and
    /// waits for it. The checkpoint before stays until this one is complete; the model is
    /// `model.safetensors` in the folder that `manifest.json` names as its generation.
    ///
    /// # Errors
    /// An [`AdapterError`]: no names, another run that saves to the folder, or a disk that does not
    /// take it; the checkpoint before is as it was then.
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
    ) -> candle_core::Result<()> {
        self.begin_save(folder.as_ref(), steps)?;
        self.finish_saves()
    }

    /// Waits until nothing is being saved.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> candle_core::Result<()> {
        let mut solo = Solo::new();
        let done = self.checkpoints.finish(&self.plan, &mut Comms::direct(&mut solo));
        done.map_err(AdapterError::from)?;
        Ok(())
    }

    /// Keeps a text in every checkpoint from the next one on, such as a serialized random
    /// generator.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.checkpoints.remembered_mut().set(name, text);
    }

    /// A text that was remembered: here, or in the checkpoint that was resumed.
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
        let begun = self.checkpoints.begin(&self.plan, run, &mut comms, (folder, steps));
        Ok(begun.map_err(AdapterError::from)?)
    }

    /// Hears of a save that has failed.
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
    /// As [`Fused::resume`], at the number of ranks that the checkpoint has or another one.
    ///
    /// # Errors
    /// As [`Fused::resume`].
    pub fn resume(&mut self, folder: impl AsRef<Path>) -> candle_core::Result<usize> {
        self.names.check()?;
        let resumed = self.try_resume(folder.as_ref());
        self.note(resumed)
    }

    fn try_resume(&mut self, folder: &Path) -> Result<usize, AdapterError> {
        let resumed = self.checkpoints.resume(
            &self.plan,
            (&mut self.state, &self.backend),
            None,
            (&mut self.comms, folder),
        )?;
        self.met = false;
        match resumed {
            None => Ok(0),
            Some(steps) => {
                self.meet()?;
                self.set_variables()?;
                Ok(steps)
            }
        }
    }

    /// As [`Fused::checkpoint_every`]; every rank copies what it keeps, and writes it behind. An
    /// error comes on all ranks in the same call.
    ///
    /// # Errors
    /// As [`Fused::checkpoint_every`].
    pub fn checkpoint_every(
        &mut self,
        every: usize,
        folder: impl AsRef<Path>,
        step: usize,
    ) -> candle_core::Result<bool> {
        let Some(steps) = due(every, step)? else {
            return Ok(false);
        };
        self.begin_save(folder.as_ref(), steps)?;
        Ok(true)
    }

    /// As [`Fused::save_checkpoint`].
    ///
    /// # Errors
    /// As [`Fused::save_checkpoint`].
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        steps: usize,
    ) -> candle_core::Result<()> {
        self.begin_save(folder.as_ref(), steps)?;
        self.finish_saves()
    }

    /// Waits until nothing is being saved on any rank.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish_saves(&mut self) -> candle_core::Result<()> {
        let finished = self.checkpoints.finish(&self.plan, &mut self.comms);
        self.note(finished.map(drop).map_err(AdapterError::from))
    }

    /// As [`Fused::remember`]; each rank has texts of its own. They come back on as many ranks, and
    /// on another number only if they were the same on all.
    pub fn remember(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.checkpoints.remembered_mut().set(name, text);
    }

    /// As [`Fused::remembered`].
    pub fn remembered(&self, name: &str) -> Option<&str> {
        self.checkpoints.remembered().get(name)
    }

    fn begin_save(&mut self, folder: &Path, steps: usize) -> candle_core::Result<()> {
        self.names.check()?;
        let run = RunToSave { state: &self.state, backend: &self.backend, params: None };
        let comms = &mut self.comms;
        let begun = self.checkpoints.begin(&self.plan, run, comms, (folder, steps));
        self.note(begun.map_err(AdapterError::from))
    }
}

/// How many steps are done if that calls for a save, once `step`, counted from 0, has been.
fn due(every: usize, step: usize) -> Result<Option<usize>, AdapterError> {
    if every == 0 {
        return Err(AdapterError::SaveEvery0);
    }
    let steps = step.saturating_add(1);
    Ok(steps.is_multiple_of(every).then_some(steps))
}
