//! Save and resume of a run, on any number of ranks.

use std::collections::BTreeMap;

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use super::commits::commit_files;
use super::counts::Progress;
use super::generation::{Generation, remove_failed};
use super::lists::{key, saved_lists, tensors_of_checkpoint};
use super::manifest::{FORMAT, Manifest, VERSION};
use super::refusal::refuse;
use super::settings::Rules;
use super::shards::write_snapshot;
use super::snapshot::Snapshot;
use super::values::SavedTensors;
use super::{BorrowedParams, CheckpointFolder, RunToSave, agree, fits, progress, snapshot};
use crate::run::comms::calls::Comms;
use crate::run::memory::segment_state::Given;
use crate::run::units::forget;
use crate::{Plan, PlanError, Result, State};

/// A checkpoint that has been read and fits the plan.
pub(crate) struct ReadRun {
    pub(super) manifest: Manifest,
    tensors: SavedTensors,
    /// The rank whose values this rank resumes from.
    from: usize,
    progress: Progress,
}

/// Implementation of [`Plan::save`].
pub(crate) fn save(
    plan: &Plan,
    run: RunToSave<'_>,
    comms: &mut Comms<'_>,
    folder: CheckpointFolder<'_>,
    caller: BTreeMap<String, String>,
) -> Result<()> {
    run.state.check_plan(plan)?;
    let rank = plan.topology().rank;
    comms.set_plan(plan.hash());
    let begun = match rank {
        0 => Generation::begin(folder, run.state.step()).map(Some),
        _ => Ok(None),
    };
    let generation = agree::on_generation(plan, comms, begun)?;
    let name = generation.name();
    let mut snapshot = Snapshot::default();
    let written = check_between(run.state)
        .and_then(|()| generation.check_seen(folder))
        .and_then(|()| snapshot::take(plan, run, folder, &mut snapshot))
        .and_then(|()| write_snapshot(folder, &name, rank, &snapshot));
    let shards = agree::on_shards(plan, comms, written);
    let shards = shards.inspect_err(|error| give_up(plan, folder, &generation, error))?;
    let committed = match rank {
        0 => manifest_of(plan, run.state, caller)
            .and_then(|manifest| commit_files(manifest, folder, &generation, shards)),
        _ => Ok(()),
    };
    agree::on_outcome(plan, comms, committed)
}

/// Removes the files of a save that one rank could not write. After a failed call other ranks may
/// still be writing, so the files stay for the next save.
pub(super) fn give_up(
    plan: &Plan,
    folder: CheckpointFolder<'_>,
    generation: &Generation,
    error: &PlanError,
) {
    if plan.topology().rank == 0 && !matches!(error, PlanError::Collective { .. }) {
        remove_failed(folder, generation);
    }
}

/// Reads a checkpoint of this manifest or a newer one, and checks that it is one of the plan.
pub(crate) fn read_run(
    plan: &Plan,
    state: &State,
    params: Option<&dyn BorrowedParams>,
    place: CheckpointFolder<'_>,
    manifest: &Manifest,
) -> Result<ReadRun> {
    state.check_plan(plan)?;
    snapshot::check_borrowed(plan, params, place)?;
    let folder = place.path;
    fits::check_manifest(plan, state, manifest, folder)?;
    let (manifest, tensors) = Manifest::read(place)?.read_newest(place)?;
    fits::check_manifest(plan, state, &manifest, folder)?;
    let from = progress::source_rank(plan, &manifest, &tensors.whole, folder)?;
    let progress = progress::counts(plan, &manifest, from, &tensors.whole, folder)?;
    fits::check_values(plan, &tensors, from, &progress, folder)?;
    if let (Some(norm), Some((scale, good, bad))) = (&state.norm, progress.loss_scale)
        && state.scaled
    {
        norm.loss_scale()
            .restored(scale, good, bad)
            .map_err(|error| refuse(folder, "loss scale", "one of the plan's policy", error))?;
    }
    Ok(ReadRun { manifest, tensors, from, progress })
}

/// Writes the values of a checkpoint to the state and to the caller's parameters; returns the texts
/// saved with them.
pub(crate) fn take_over(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    params: Option<&dyn BorrowedParams>,
    run: ReadRun,
) -> Result<BTreeMap<String, String>> {
    for (param, desc) in plan.params().iter().enumerate() {
        // Parameters first: a master that is written after its parameter keeps its own bits.
        for (role, _) in saved_lists(plan, param)? {
            let key = key(plan, param, role, run.from);
            let bytes = run.tensors.bytes(&key);
            match params.filter(|_| role == Role::Param) {
                Some(params) => params.write(param, bytes)?,
                None => state.write_all(backend, role, &desc.name, bytes)?,
            }
        }
    }
    state.written.release();
    forget(state);
    progress::restore_counts(plan, state, backend, &run.progress)?;
    progress::restore_open(plan, state, backend, &run.progress, run.from, &run.tensors.whole)?;
    state.poisoned = None;
    Ok(run.manifest.caller)
}

pub(super) fn check_between(state: &State) -> Result<()> {
    state.check_counts()?;
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

/// The manifest of a state, without its files.
pub(super) fn manifest_of(
    plan: &Plan,
    state: &State,
    caller: BTreeMap<String, String>,
) -> Result<Manifest> {
    let params = plan.params().iter().enumerate();
    let steps_of = params.filter_map(|(param, desc)| {
        let step = state.step - state.steps_behind[param];
        let differs = step != state.step && desc.numel() > 0;
        differs.then(|| (desc.name.clone(), step))
    });
    let (scale, rules) = (state.loss_scale(), Rules::of(state));
    let open = progress::open_run(plan, state);
    Ok(Manifest {
        format: FORMAT.to_owned(),
        version: VERSION,
        xxh3: String::new(),
        checkpoint: String::new(),
        optimizer: rules.first.name().to_owned(),
        objective: rules.objective(),
        optimizer_of: rules.own_names(),
        settings: rules.settings(),
        schedule: plan.schedule().map(ToString::to_string),
        step: state.step,
        skipped: state.skipped(),
        loss_scale: scale.map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps())),
        steps_of: steps_of.collect(),
        caller,
        tensors: tensors_of_checkpoint(plan, open.as_ref())?,
        open,
        generation: String::new(),
        shards: Vec::new(),
    })
}
