//! Commits of manifests: files that all ranks have written become the checkpoint.

use fusestep_tensor_file::Prepared;

use crate::CheckpointFolder;
use crate::Result;
use crate::generation::{self, Generation};
use crate::manifest::{MANIFEST, Manifest, ShardSpec, VERSION, no_json};
use crate::place::sync;

/// Fills in the files that all ranks have written, checks that they are there, and commits the
/// manifest.
pub(crate) fn commit_files(
    mut manifest: Manifest,
    folder: CheckpointFolder<'_>,
    generation: &Generation,
    shards: Vec<ShardSpec>,
) -> Result<()> {
    manifest.generation = generation.name();
    manifest.checkpoint = generation.checkpoint();
    manifest.shards = shards;
    let seen = manifest.check_shards_seen(folder);
    let committed = seen.and_then(|()| commit(manifest, folder));
    let committed = committed.inspect_err(|_| generation::remove_failed(folder, generation));
    committed.map(drop)
}

/// Replaces the checkpoint's manifest by this one, then removes the checkpoint's other generations.
pub(crate) fn commit(mut manifest: Manifest, folder: CheckpointFolder<'_>) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    // A manifest that cannot be read is not replaced.
    let previous = Manifest::read_if_any(folder)?;
    // The generation's own name must be on disk before anything refers to it.
    sync(folder, folder.path)?;
    manifest.version = VERSION;
    manifest.xxh3 = manifest.checksum(&path)?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| no_json(&path, &error))?;
    Prepared::bytes_in(folder.files, &path, &text)?.commit()?;
    let counts = Some(manifest.generation.as_str());
    generation::remove_but(folder, &manifest.checkpoint, counts, previous.as_ref());
    Ok(manifest)
}
