//! Methods of a plan that save a run and go on from it.

use std::collections::BTreeMap;

use fusestep_launch::Backend;

use crate::checkpoint::save;
use crate::error::Result;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::memory::state::State;
use crate::{CheckpointFolder, Manifest, RunToSave};
#[cfg(doc)]
use crate::{Checkpoints, PlanError, Saves};

impl Plan {
    /// Saves parameters, optimizer state and counts, and texts of the caller's own; all ranks call
    /// it, between micro-steps. [`Saves::begin`] does not wait for the disk, and takes parameters
    /// that the caller keeps.
    ///
    /// Every rank writes what it updates; in the middle of a merge window also its sums, and under
    /// LocalSGD everything, because ranks differ ([`crate::OpenRun`]). Rank 0 then writes the
    /// manifest, and only then removes the checkpoint before: a run that is killed at any
    /// instant leaves the old one or the new one.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`], [`PlanError::File`] of any rank, on that rank;
    /// [`PlanError::Topology`] on the others. The checkpoint before is as it was.
    /// [`PlanError::Conflict`] between the gradients of a micro-step.
    pub fn save<'a>(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        folder: impl Into<CheckpointFolder<'a>>,
        caller: BTreeMap<String, String>,
    ) -> Result<()> {
        let run = RunToSave { state, backend, params: None };
        save::save(self, run, comms, folder.into(), caller)
    }

    /// Goes on from a checkpoint, of however many ranks; returns the texts that were saved with it.
    /// All ranks call it. [`Checkpoints::resume`] also loads into parameters that the caller keeps.
    ///
    /// What was saved in the middle of a merge window or under LocalSGD ([`crate::OpenRun`]) takes
    /// as many ranks as it was saved on, at any ZeRO stage and with any buckets, unless all ranks
    /// were alike: at an average whose state is averaged too or empty, in a window whose gradients
    /// are reduced in every micro-step, or after [`crate::Manifest::average`].
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming what is missing, damaged or of another model or optimizer.
    /// Everything is checked before anything is written.
    pub fn load<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        folder: impl Into<CheckpointFolder<'a>>,
    ) -> Result<BTreeMap<String, String>> {
        // What does not fit is refused before anything long is read; a run may save meanwhile.
        let place = folder.into();
        let manifest = Manifest::read(place)?;
        let run = save::read_run(self, state, None, place, &manifest)?;
        save::take_over(self, state, backend, None, run)
    }
}
