//! A run of many ranks saved and resumed, on as many ranks or others.

use std::collections::BTreeMap;

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role, Shape};

use super::counts::Progress;
use super::generation::{Generation, remove_failed};
use super::manifest::{Manifest, TensorSpec, refuse};
use super::shards::write_snapshot;
use super::snapshot::Snapshot;
use super::{BorrowedParams, CheckpointFolder, OpenRun, RunToSave, WholeTensors};
use crate::arena::Given;
use crate::comms::Comms;
use crate::in_backward::forget;
use crate::{Plan, PlanError, State, ZeroStage};

/// A checkpoint that has been read and is one of a plan.
pub(super) struct ReadRun {
    pub(super) manifest: Manifest,
    whole: WholeTensors,
    /// The rank whose own values this one goes on from.
    from: usize,
    progress: Progress,
}

impl Plan {
    /// Saves parameters, optimizer state and counts, and texts of the caller's own; all ranks call
    /// it, between micro-steps.
    ///
    /// Every rank writes what it updates; in the middle of a merge window also its sums, and under
    /// LocalSGD everything, because ranks differ ([`OpenRun`]). Rank 0 then writes the
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
        let run = RunToSave {
            state,
            backend,
            params: None,
        };
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
        let folder = folder.into();
        self.check_state(run.state)?;
        let rank = self.topology().rank;
        comms.set_plan(self.hash());
        let begun = match rank {
            0 => Generation::begin(folder, run.state.step()).map(Some),
            _ => Ok(None),
        };
        let generation = self.agree_on_generation(comms, begun)?;
        let name = generation.name();
        let mut snapshot = Snapshot::default();
        let written = self
            .check_between(run.state)
            .and_then(|()| generation.check_seen(folder))
            .and_then(|()| self.snapshot(run, folder, &mut snapshot))
            .and_then(|()| write_snapshot(folder, &name, rank, &snapshot));
        let shards = self.agree_on_shards(comms, written);
        let shards = shards.inspect_err(|error| self.give_up(folder, &generation, error))?;
        let committed = match rank {
            0 => self
                .manifest(run.state, caller)
                .and_then(|manifest| manifest.commit_to(folder, &generation, shards)),
            _ => Ok(()),
        };
        self.agree(comms, committed)
    }

    /// Removes what all ranks have written of a save that one of them could not write; while they
    /// may be writing, because calls fail, it stays for the next save.
    pub(super) fn give_up(
        &self,
        folder: CheckpointFolder<'_>,
        generation: &Generation,
        error: &PlanError,
    ) {
        if self.topology().rank == 0 && !matches!(error, PlanError::Collective { .. }) {
            remove_failed(folder, generation);
        }
    }

    /// Goes on from a checkpoint, of however many ranks; returns the texts that were saved with it.
    /// All ranks call it.
    ///
    /// What was saved in the middle of a merge window or under LocalSGD ([`OpenRun`]) takes as many
    /// ranks as it was saved on, at any ZeRO stage and with any buckets, unless all ranks were
    /// alike: at an average whose state is averaged too or empty, in a window whose gradients
    /// are reduced in every micro-step, or after [`Manifest::average`].
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
        let place = folder.into();
        // What does not fit is refused before anything long is read; a run may save meanwhile.
        let manifest = Manifest::read(place)?;
        let run = self.read_run(state, params, (place, &manifest))?;
        self.take_over(state, backend, params, run)
    }

    /// Reads a checkpoint of this manifest or a newer one, and checks that it is one of the plan.
    pub(super) fn read_run(
        &self,
        state: &State,
        params: Option<&dyn BorrowedParams>,
        (place, manifest): (CheckpointFolder<'_>, &Manifest),
    ) -> Result<ReadRun, PlanError> {
        self.check_state(state)?;
        self.check_borrowed(params, place)?;
        let folder = place.path;
        self.check_manifest(manifest, folder)?;
        let (manifest, (whole, noted)) = Manifest::read(place)?.read_newest(place)?;
        self.check_manifest(&manifest, folder)?;
        let from = self.source_rank(&manifest, &whole, folder)?;
        self.check_values((&whole, &noted, from), folder)?;
        let progress = self.progress((&manifest, from), &whole, folder)?;
        if let (Some(norm), Some((scale, good, bad))) = (&state.norm, progress.loss_scale)
            && state.scaled
        {
            norm.loss_scale()
                .restored(scale, good, bad)
                .map_err(|error| {
                    let expected = "one of the plan's policy";
                    refuse(folder, "loss scale", expected, error.to_string())
                })?;
        }
        Ok(ReadRun {
            manifest,
            whole,
            from,
            progress,
        })
    }

    /// Makes what was read the state's and the caller's; returns the texts saved with it.
    pub(super) fn take_over(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        params: Option<&dyn BorrowedParams>,
        run: ReadRun,
    ) -> Result<BTreeMap<String, String>, PlanError> {
        for (param, desc) in self.params().iter().enumerate() {
            // Parameters first: a master that is written after its parameter keeps its own bits.
            for role in self.roles(param)? {
                let key = self.key(param, role, run.from);
                let bytes = run.whole.get(&key).map_or(&[][..], Vec::as_slice);
                match params.filter(|_| role == Role::Param) {
                    Some(params) => params.write(param, bytes)?,
                    None => state.write(backend, role, &desc.name, bytes)?,
                }
            }
        }
        forget(state);
        self.restore_counts(state, backend, &run.progress)?;
        self.restore_open(state, backend, (&run.progress, run.from), &run.whole)?;
        state.poisoned = None;
        Ok(run.manifest.caller)
    }

    pub(super) fn check_between(&self, state: &State) -> Result<(), PlanError> {
        let given = |given: &Given| *given != Given::No;
        if !state.arena.now.iter().any(given) {
            return Ok(());
        }
        Err(PlanError::Conflict {
            first: "a checkpoint".to_owned(),
            second: "gradients of a micro-step under way".to_owned(),
            why: "do not go together; end the micro-step by `step` before saving",
        })
    }

    /// A tensor's name in a checkpoint; that of values of a rank's own has the rank.
    pub(super) fn key(&self, param: usize, role: Role, rank: usize) -> String {
        let name = &self.params()[param].name;
        if self.has_own(param) {
            format!("{name}@{}#{rank}", role.name())
        } else {
            format!("{name}@{}", role.name())
        }
    }

    /// Whether this rank saves what others have as well: without shards rank 0, with them the first
    /// group of ranks.
    pub(crate) fn saves_shared(&self) -> bool {
        let rank = self.topology().rank;
        match self.zero() {
            ZeroStage::None => rank == 0,
            _ => rank < self.shard_group,
        }
    }

    /// Roles that are saved: all but the gradient's, the parameter's first.
    pub(super) fn roles(&self, param: usize) -> Result<Vec<Role>, PlanError> {
        let kernel = self.kernel_of(param as u32)?;
        let mut roles: Vec<Role> = kernel.lists().iter().map(|list| list.role).collect();
        roles.retain(|role| role.is_state() || *role == Role::Param);
        roles.sort_by_key(|role| *role != Role::Param);
        Ok(roles)
    }

    pub(super) fn role_dtype(&self, param: usize, role: Role) -> Result<DType, PlanError> {
        let kernel = self.kernel_of(param as u32)?;
        let list = kernel.lists().iter().find(|list| list.role == role);
        Ok(list.map_or(self.params()[param].dtype, |list| list.dtype))
    }

    /// What a checkpoint holds, without its files.
    pub(super) fn manifest(
        &self,
        state: &State,
        caller: BTreeMap<String, String>,
    ) -> Result<Manifest, PlanError> {
        let mut manifest = Manifest::new(self.optimizer().name().to_owned(), state.step());
        manifest.objective = self.objective();
        manifest.optimizer_of = self.own_rules();
        manifest.settings = self.settings_of_state();
        manifest.schedule = self.schedule().map(ToString::to_string);
        manifest.skipped = state.skipped();
        manifest.loss_scale = state
            .loss_scale()
            .map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps()));
        manifest.caller = caller;
        for (param, desc) in self.params().iter().enumerate() {
            let step = state.step - state.steps_behind[param];
            if step != state.step() && desc.numel() > 0 {
                manifest.steps_of.insert(desc.name.clone(), step);
            }
        }
        manifest.open = self.open_run(state);
        manifest.tensors = self.tensors_of_checkpoint(manifest.open.as_ref())?;
        Ok(manifest)
    }

    pub(super) fn tensors_of_checkpoint(
        &self,
        open: Option<&OpenRun>,
    ) -> Result<BTreeMap<String, TensorSpec>, PlanError> {
        let mut tensors = BTreeMap::new();
        if let Some(open) = open {
            tensors.extend(self.open_tensors(open)?);
        }
        for (param, desc) in self.params().iter().enumerate() {
            for role in self.roles(param)? {
                let shape: Shape = desc.shape.clone();
                let dtype = self.role_dtype(param, role)?;
                let ranks = match (self.has_own(param), open) {
                    (false, _) => 0..1,
                    (true, Some(open)) => 0..open.ranks,
                    (true, None) => 0..self.topology().world,
                };
                for rank in ranks {
                    let (dtype, shape) = (dtype, shape.clone());
                    let key = self.key(param, role, rank);
                    tensors.insert(key, TensorSpec { dtype, shape });
                }
            }
        }
        Ok(tensors)
    }
}
