//! A run as a whole: begun alike on all ranks, saved and resumed, in line and behind the steps.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_launch::Backend;

use crate::checkpoint::{BorrowedParams, behind, save};
use crate::comms::Comms;
use crate::{CheckpointFolder, Plan, PlanError, RunToSave, Saved, Saves, State, gather, handshake};

impl Plan {
    /// Compares what decides the bits of a run over all ranks: rules and all their settings,
    /// settings of parameters, passes, dtypes, steps and learning rates, initial values by
    /// hash, and `caller`'s own fields, such as the seed and the size of batches. All ranks
    /// call it before the first step and after a checkpoint has been loaded.
    ///
    /// # Errors
    /// [`PlanError::RanksDiffer`] naming the field and both values, on all ranks;
    /// [`PlanError::Collective`], [`PlanError::Backend`].
    /// # Cost
    /// One read of the parameters; three small calls.
    pub fn handshake(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        caller: &[(&str, String)],
    ) -> Result<(), PlanError> {
        handshake::handshake(self, state, backend, comms, caller)
    }

    /// The part of [`Plan::handshake`] that needs no values: for ranks that are about to be given
    /// those of one of them.
    ///
    /// # Errors
    /// As [`Plan::handshake`].
    pub fn compare_settings(&self, state: &State, comms: &mut Comms<'_>) -> Result<(), PlanError> {
        handshake::compare_settings(self, state, comms)
    }

    /// Compares parameters over all ranks by hash; for ranks that hold all of them alike (ZeRO
    /// stages 0 to 2, no LocalSGD).
    ///
    /// # Errors
    /// As [`Plan::handshake`].
    pub fn compare_parameters(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        handshake::compare_parameters(self, state, backend, comms)
    }

    /// Brings the parameters of rank `root` to all ranks, before the first step: many in one call,
    /// as many bytes at once as a bucket has. At ZeRO stage 3 every rank sends what it has of
    /// them to nobody: all have written the same ([`State::write`]).
    ///
    /// # Errors
    /// [`PlanError::InShards`] at ZeRO stage 3; [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn broadcast_parameters(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        root: usize,
    ) -> Result<(), PlanError> {
        gather::broadcast_parameters(self, state, backend, comms, root)
    }

    /// Saves parameters, optimizer state and counts, and texts of the caller's own; all ranks call
    /// it, between micro-steps.
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
    ) -> Result<(), PlanError> {
        let run = RunToSave { state, backend, params: None };
        self.save_run(run, comms, folder, caller)
    }

    /// [`Plan::save`], also of a run whose parameters the caller keeps. [`Plan::save_behind`] does
    /// not wait for the disk.
    ///
    /// # Errors
    /// As [`Plan::save`].
    pub fn save_run<'a>(
        &self,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        folder: impl Into<CheckpointFolder<'a>>,
        caller: BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        save::save(self, run, comms, folder.into(), caller)
    }

    /// Goes on from a checkpoint, of however many ranks; returns the texts that were saved with it.
    /// All ranks call it.
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
    ) -> Result<BTreeMap<String, String>, PlanError> {
        self.load_run(state, backend, None, folder)
    }

    /// [`Plan::load`], also into parameters that the caller keeps.
    ///
    /// # Errors
    /// As [`Plan::load`].
    pub fn load_run<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        params: Option<&dyn BorrowedParams>,
        folder: impl Into<CheckpointFolder<'a>>,
    ) -> Result<BTreeMap<String, String>, PlanError> {
        save::load(self, state, backend, params, folder.into())
    }

    /// Begins a save of what [`Plan::save_run`] saves: copies it and returns, once a save before
    /// it is complete. All ranks call it, between micro-steps, and then [`Plan::poll_saves`] in
    /// every step, until that says that the save is complete.
    ///
    /// # Errors
    /// As [`Plan::save_run`], for what can be told before anything is written. That of the save
    /// before, and this one has not been begun then. On all ranks alike.
    /// # Cost
    /// One copy of what this rank saves; two small calls.
    pub fn save_behind(
        &self,
        run: RunToSave<'_>,
        comms: &mut Comms<'_>,
        saves: &mut Saves,
        folder: &Path,
        caller: BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        behind::save(self, run, comms, saves, folder, caller)
    }

    /// Looks after the save in flight, if there is one, without waiting for a disk; says so when it
    /// is complete. All ranks call it alike: as part of every step, for example.
    ///
    /// # Errors
    /// As [`Plan::save_run`], on all ranks in the same call; the checkpoint before is as it was,
    /// and nothing is in flight any more.
    /// # Cost
    /// One reduction of a byte while a save is in flight, and nothing otherwise.
    pub fn poll_saves(
        &self,
        comms: &mut Comms<'_>,
        saves: &mut Saves,
    ) -> Result<Option<Saved>, PlanError> {
        behind::poll(self, comms, saves)
    }

    /// Waits until nothing is in flight; all ranks call it, at the end of training. Says which save
    /// it has completed.
    ///
    /// # Errors
    /// As [`Plan::poll_saves`].
    pub fn finish_saves(
        &self,
        comms: &mut Comms<'_>,
        saves: &mut Saves,
    ) -> Result<Option<Saved>, PlanError> {
        behind::finish(self, comms, saves)
    }
}
