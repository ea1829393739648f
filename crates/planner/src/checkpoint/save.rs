//! A run of many ranks saved and resumed, on as many ranks or others.

use std::collections::BTreeMap;

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};

use super::counts::Progress;
use super::generation::{Generation, remove_failed};
use super::manifest::{FORMAT, Manifest, TensorSpec, VERSION, refuse};
use super::settings::Rules;
use super::shards::write_snapshot;
use super::snapshot::Snapshot;
use super::{
    BorrowedParams, CheckpointFolder, OpenRun, RunToSave, WholeTensors, agree, fits, progress,
    snapshot,
};
use crate::arena::Given;
use crate::comms::Comms;
use crate::in_backward::forget;
use crate::{Plan, PlanError, Result, State};

/// A checkpoint that has been read and is one of a plan.
pub(crate) struct ReadRun {
    pub(super) manifest: Manifest,
    whole: WholeTensors,
    /// The rank whose own values this one goes on from.
    from: usize,
    progress: Progress,
}

/// [`Plan::save`].
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
            .and_then(|manifest| manifest.commit_to(folder, &generation, shards)),
        _ => Ok(()),
    };
    agree::on_outcome(plan, comms, committed)
}

/// Removes what all ranks have written of a save that one of them could not write; while they may
/// be writing, because calls fail, it stays for the next save.
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
    (place, manifest): (CheckpointFolder<'_>, &Manifest),
) -> Result<ReadRun> {
    state.check_plan(plan)?;
    snapshot::check_borrowed(plan, params, place)?;
    let folder = place.path;
    fits::check_manifest(plan, state, manifest, folder)?;
    let (manifest, (whole, noted)) = Manifest::read(place)?.read_newest(place)?;
    fits::check_manifest(plan, state, &manifest, folder)?;
    let from = progress::source_rank(plan, &manifest, &whole, folder)?;
    fits::check_values(plan, (&whole, &noted, from), folder)?;
    let progress = progress::counts(plan, (&manifest, from), &whole, folder)?;
    if let (Some(norm), Some((scale, good, bad))) = (&state.norm, progress.loss_scale)
        && state.scaled
    {
        norm.loss_scale()
            .restored(scale, good, bad)
            .map_err(|error| refuse(folder, "loss scale", "one of the plan's policy", error))?;
    }
    Ok(ReadRun { manifest, whole, from, progress })
}

/// Makes what was read the state's and the caller's; returns the texts saved with it.
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
            let bytes = run.whole.get(&key).map_or(&[][..], Vec::as_slice);
            match params.filter(|_| role == Role::Param) {
                Some(params) => params.write(param, bytes)?,
                None => state.write(backend, role, &desc.name, bytes)?,
            }
        }
    }
    forget(state);
    progress::restore_counts(plan, state, backend, &run.progress)?;
    progress::restore_open(plan, state, backend, (&run.progress, run.from), &run.whole)?;
    state.poisoned = None;
    Ok(run.manifest.caller)
}

pub(super) fn check_between(state: &State) -> Result<()> {
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
pub(super) fn key(plan: &Plan, param: usize, role: Role, rank: usize) -> String {
    let name = &plan.params()[param].name;
    if plan.has_own(param) {
        format!("{name}@{}#{rank}", role.name())
    } else {
        format!("{name}@{}", role.name())
    }
}

/// Lists that are saved, as role and dtype: all but the gradient's, the parameter's first.
pub(super) fn saved_lists(plan: &Plan, param: usize) -> Result<Vec<(Role, DType)>> {
    let kernel = plan.kernel_of(param as u32)?;
    let mut lists: Vec<_> = kernel.lists().iter().map(|list| (list.role, list.dtype)).collect();
    lists.retain(|(role, _)| role.is_state() || *role == Role::Param);
    lists.sort_by_key(|(role, _)| *role != Role::Param);
    Ok(lists)
}

/// What a checkpoint holds, without its files.
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

pub(super) fn tensors_of_checkpoint(
    plan: &Plan,
    open: Option<&OpenRun>,
) -> Result<BTreeMap<String, TensorSpec>> {
    let mut tensors = BTreeMap::new();
    if let Some(open) = open {
        tensors.extend(progress::open_tensors(plan, open)?);
    }
    for (param, desc) in plan.params().iter().enumerate() {
        for (role, dtype) in saved_lists(plan, param)? {
            let ranks = match (plan.has_own(param), open) {
                (false, _) => 0..1,
                (true, Some(open)) => 0..open.ranks,
                (true, None) => 0..plan.topology().world,
            };
            for rank in ranks {
                let spec = TensorSpec { dtype, shape: desc.shape.clone() };
                tensors.insert(key(plan, param, role, rank), spec);
            }
        }
    }
    Ok(tensors)
}
