//! Any bytes as the mark of a folder that a save would write to, and of one that it would remove.

use std::path::Path;

use fusestep_planner::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use fusestep_testkit::SimulatedDisk;

use super::manifest::{FILES, FOLDER, NEW, read_whole};
use crate::Outcome;

pub(crate) fn run(input: &[u8]) -> Outcome {
    let in_words = |error: &dyn std::fmt::Display| error.to_string();
    let manifest = Manifest::parse(Path::new(FOLDER), NEW).map_err(|error| in_words(&error))?;
    let (stem, turn) = manifest.generation.rsplit_once('-').ok_or("no turn")?;
    let other = format!("{stem}-{}", if turn == "a" { "b" } else { "a" });
    let mut said = String::new();
    for marked in [other.as_str(), "step-00000007-a"] {
        let disk = checkpoint(&manifest).map_err(|error| in_words(&error))?;
        let place = Path::new(FOLDER).join(marked);
        let mut made = disk.create_folder(&place);
        made = made.and_then(|()| disk.write_new(&place.join("mark.json"), input));
        made = made.and_then(|()| disk.write_new(&place.join("shard-00009.safetensors"), b"own"));
        made.map_err(|error| in_words(&error))?;
        said += &saved_beside(&disk, &place, &manifest, input)?;
        said.push('\n');
    }
    Ok(said)
}

/// A save into the checkpoint: only what its mark calls the checkpoint's own is removed, and a
/// refused one has changed nothing.
fn saved_beside(disk: &SimulatedDisk, marked: &Path, manifest: &Manifest, mark: &[u8]) -> Outcome {
    let folder = CheckpointFolder::of(disk, Path::new(FOLDER));
    let before = content(disk);
    let saved = manifest.reshard(folder, folder, 2);
    let kept = disk.read(&marked.join("shard-00009.safetensors")).is_ok();
    if !kept && !names(mark, &manifest.checkpoint) {
        return Err("a stranger's file was removed".to_owned());
    }
    match saved {
        Ok(saved) => {
            let whole = read_whole(folder, &saved)?;
            match whole.as_str() {
                "whole" => Ok(if kept { "kept" } else { "removed" }.to_owned()),
                other => Err(format!("saved, and cannot be read: {other}")),
            }
        }
        Err(error) if content(disk) == before => Ok(error.to_string()),
        Err(error) => Err(format!("refused, and changed all the same: {error}")),
    }
}

/// Whether a mark has the checkpoint's id among its texts, however they are written.
fn names(mark: &[u8], checkpoint: &str) -> bool {
    let texts = serde_json::from_slice::<serde_json::Value>(mark).unwrap_or_default();
    let texts: Vec<&serde_json::Value> = match &texts {
        serde_json::Value::Object(fields) => fields.values().collect(),
        serde_json::Value::Array(fields) => fields.iter().collect(),
        _ => Vec::new(),
    };
    texts.into_iter().any(|text| text == checkpoint)
}

/// All files with their bytes.
pub(super) fn content(disk: &SimulatedDisk) -> Vec<(std::path::PathBuf, Option<Vec<u8>>)> {
    let read = |path: std::path::PathBuf| {
        let bytes = disk.read(&path).ok();
        (path, bytes)
    };
    disk.files().into_iter().map(read).collect()
}

/// The checkpoint of the corpus, marked.
fn checkpoint(manifest: &Manifest) -> std::io::Result<SimulatedDisk> {
    let disk = SimulatedDisk::new(0, []);
    let generation = Path::new(FOLDER).join(&manifest.generation);
    disk.create_folder(&generation)?;
    disk.write_new(&Path::new(FOLDER).join("manifest.json"), NEW)?;
    for (shard, bytes) in manifest.shards.iter().zip(FILES) {
        disk.write_new(&generation.join(&shard.file), bytes)?;
    }
    let mark = serde_json::json!({
        "format": "fusestep-generation",
        "checkpoint": manifest.checkpoint,
    });
    disk.write_new(&generation.join("mark.json"), mark.to_string().as_bytes())?;
    Ok(disk)
}
