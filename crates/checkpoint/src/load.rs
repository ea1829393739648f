//! Checkpoints read into a run, on any number of ranks.

use std::collections::BTreeMap;

use fusestep_planner::{BorrowedParams, List, RunCounts, RunImage, RunToLoad};

use crate::manifest::Manifest;
use crate::own_values::{lanes_key, window_key};
use crate::refusal::refuse;
use crate::values::SavedTensors;
use crate::{CheckpointFolder, Result, fits, lists, own_values, snapshot};

/// A checkpoint that has been read and fits the run.
pub(crate) struct ReadRun {
    pub(crate) manifest: Manifest,
    /// The run that it fits.
    image: RunImage,
    tensors: SavedTensors,
    /// The rank whose values this rank resumes from.
    from: usize,
    counts: RunCounts,
}

/// Goes on from a checkpoint, of however many ranks; returns the texts that were saved with it. All
/// ranks call it. `Checkpoints::resume` also lets ranks agree on what they have read.
///
/// A save in the middle of a merge window or under LocalSGD ([`crate::OpenRun`]) takes as many
/// ranks as it was made on, at any ZeRO stage and with any buckets, unless all ranks were alike: at
/// an average whose state is averaged too or empty, in a window whose gradients are reduced in
/// every micro-step, or after [`Manifest::average`].
///
/// # Errors
/// [`PlanError::Checkpoint`] naming what is missing, damaged or of another model or optimizer.
/// Everything is checked before anything is written.
///
/// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
pub fn load<'a>(
    run: RunToLoad<'_>,
    folder: impl Into<CheckpointFolder<'a>>,
) -> Result<BTreeMap<String, String>> {
    // What does not fit is refused before anything long is read; a run may save meanwhile.
    let place = folder.into();
    let image = run.describe()?;
    let manifest = Manifest::read(place)?;
    let read = read_run(image, run.params, place, &manifest)?;
    take_over(run, read)
}

/// Reads a checkpoint of this manifest or a newer one, and checks that it is one of the run.
pub(crate) fn read_run(
    image: RunImage,
    params: Option<&dyn BorrowedParams>,
    place: CheckpointFolder<'_>,
    manifest: &Manifest,
) -> Result<ReadRun> {
    snapshot::check_borrowed(image.tensors, params, place)?;
    let folder = place.path;
    fits::check_manifest(&image, manifest, folder)?;
    let (manifest, tensors) = Manifest::read(place)?.read_newest(place)?;
    fits::check_manifest(&image, &manifest, folder)?;
    let from = own_values::source_rank(&image, &manifest, &tensors.whole, folder)?;
    let counts = own_values::counts(&image, &manifest, from, &tensors.whole, folder)?;
    fits::check_values(&image, &tensors, from, &counts, folder)?;
    if let (Some(own), Some((scale, good, bad))) = (image.loss_scale, counts.loss_scale) {
        own.restored(scale, good, bad)
            .map_err(|error| refuse(folder, "loss scale", "one of the plan's policy", error))?;
    }
    Ok(ReadRun { manifest, image, tensors, from, counts })
}

/// Writes the values of a checkpoint to the run; returns the texts saved with them.
pub(crate) fn take_over(run: RunToLoad<'_>, read: ReadRun) -> Result<BTreeMap<String, String>> {
    let ReadRun { manifest, image, tensors, from, counts } = read;
    run.restore(&image, &counts, |param, list| match list {
        List::Role(role) => Some(tensors.bytes(&lists::key(&image, param, role, from))),
        List::Sums => tensors.whole.get(&window_key(&image, param, from)).map(Vec::as_slice),
        List::Lanes(part) => {
            let lanes = counts.lanes.as_ref()?;
            tensors.whole.get(&lanes_key(&image, param, lanes, part)).map(Vec::as_slice)
        }
    })?;
    Ok(manifest.caller)
}
