//! Any bytes as a checkpoint's manifest, with files of the right lengths beside it.

use std::path::Path;

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use fusestep_testkit::SimulatedDisk;

use crate::Outcome;

pub(super) const FOLDER: &str = "/c";

pub(crate) fn run(input: &[u8]) -> Outcome {
    let disk = SimulatedDisk::new(0, []);
    let made = disk.create_folder(Path::new(FOLDER));
    let made = made.and_then(|()| disk.write_new(Path::new("/c/manifest.json"), input));
    made.map_err(|error| error.to_string())?;
    let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
    let manifest = match Manifest::read(folder) {
        Ok(manifest) => manifest,
        Err(error) => return Ok(error.to_string()),
    };
    // The files that it names, if it names them so.
    let generation = Path::new(FOLDER).join(&manifest.generation);
    let _ = disk.create_folder(&generation);
    for (shard, bytes) in manifest.shards.iter().zip(FILES) {
        let _ = disk.write_new(&generation.join(&shard.file), bytes);
    }
    read_whole(folder, &manifest)
}

/// Reads what a manifest names: each tensor is as long as its shape.
pub(super) fn read_whole(folder: CheckpointFolder<'_>, manifest: &Manifest) -> Outcome {
    let whole = match manifest.read_tensors(folder) {
        Ok(whole) => whole,
        Err(error) => return Ok(error.to_string()),
    };
    for (name, spec) in &manifest.tensors {
        let expected = spec.shape.numel() * spec.dtype.len_bytes() as u64;
        let found = whole.get(name).map_or(0, Vec::len) as u64;
        if found != expected {
            return Err(format!("`{name}`: expected {expected} bytes, found {found}"));
        }
    }
    Ok("whole".to_owned())
}

/// The manifest in the corpus, of the version that is written.
pub(super) const NEW: &[u8] = include_bytes!("../../corpus/manifest/new.json");

/// The files that it names, in its order.
pub(super) const FILES: [&[u8]; 3] = [
    include_bytes!("../../shards/model.safetensors"),
    include_bytes!("../../shards/shard-00000.safetensors"),
    include_bytes!("../../shards/shard-00001.safetensors"),
];
