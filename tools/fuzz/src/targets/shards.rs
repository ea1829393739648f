//! Any bytes as each file of a checkpoint whose manifest names them by their length and checksum.

use std::path::Path;

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use fusestep_testkit::SimulatedDisk;
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{FILES, FOLDER, NEW, read_whole};
use crate::Outcome;

pub(crate) fn run(input: &[u8]) -> Outcome {
    let mut said = String::new();
    for at in 0..FILES.len() {
        said += &with_file(at, input)?;
        said.push('\n');
    }
    Ok(said)
}

/// What a reader makes of the checkpoint with one of its files replaced.
fn with_file(at: usize, input: &[u8]) -> Outcome {
    let in_words = |error: &dyn std::fmt::Display| error.to_string();
    let folder = Path::new(FOLDER);
    let mut manifest = Manifest::parse(folder, NEW).map_err(|error| in_words(&error))?;
    let spec = manifest.shards.get_mut(at).ok_or("fewer files")?;
    spec.len_bytes = input.len() as u64;
    spec.xxh3 = sum(input);
    manifest.xxh3 = String::new();
    manifest.xxh3 = sum(&serde_json::to_vec(&manifest).map_err(|error| in_words(&error))?);
    let text = serde_json::to_vec(&manifest).map_err(|error| in_words(&error))?;
    let disk = SimulatedDisk::new(0, []);
    let generation = folder.join(&manifest.generation);
    let mut made = disk.create_folder(&generation);
    made = made.and_then(|()| disk.write_new(&folder.join("manifest.json"), &text));
    for (place, (shard, bytes)) in manifest.shards.iter().zip(FILES).enumerate() {
        let bytes = if place == at { input } else { bytes };
        made = made.and_then(|()| disk.write_new(&generation.join(&shard.file), bytes));
    }
    made.map_err(|error| in_words(&error))?;
    let folder = CheckpointFolder::of(&disk, folder);
    let manifest = Manifest::read(folder).map_err(|error| in_words(&error))?;
    read_whole(folder, &manifest)
}

fn sum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}
