//! Any bytes as the mark of a folder that a save would write to, and of one that it would remove,
//! and as the list of generations that a checkpoint has begun.

use std::path::Path;

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use fusestep_testkit::SimulatedDisk;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{FILES, FOLDER, NEW, read_whole};
use crate::Outcome;

/// What a list of generations says, in the order in which its checksum is taken.
#[derive(Serialize, Deserialize)]
struct List {
    format: String,
    version: u32,
    checkpoint: String,
    generations: Vec<String>,
    xxh3: String,
}

impl List {
    /// One that has these generations.
    fn of(manifest: &Manifest, generations: Vec<String>) -> Vec<u8> {
        let list = Self {
            format: "fusestep-generations".to_owned(),
            version: 1,
            checkpoint: manifest.checkpoint.clone(),
            generations,
            xxh3: String::new(),
        };
        list.signed()
    }

    fn signed(mut self) -> Vec<u8> {
        self.xxh3 = String::new();
        let sum = xxh3_64(&serde_json::to_vec(&self).unwrap_or_default());
        self.xxh3 = format!("{sum:016x}");
        serde_json::to_vec(&self).unwrap_or_default()
    }
}

/// A generation that is another step's than the checkpoint's.
const OLDER: &str = "step-00000007-a";

/// The list of the corpus: of a checkpoint that has begun one generation.
pub(crate) fn list_of(manifest: &Manifest) -> Vec<u8> {
    List::of(manifest, vec![OLDER.to_owned()])
}

pub(crate) fn run(input: &[u8]) -> Outcome {
    let in_words = |error: &dyn std::fmt::Display| error.to_string();
    let manifest = Manifest::parse(Path::new(FOLDER), NEW).map_err(|error| in_words(&error))?;
    let (stem, turn) = manifest.generation.rsplit_once('-').ok_or("no turn")?;
    let other = format!("{stem}-{}", if turn == "a" { "b" } else { "a" });
    let names = [other, OLDER.to_owned()];
    let own = mark_of(&manifest);
    let mut said = String::new();
    for name in &names {
        let listed = List::of(&manifest, names.to_vec());
        said += &saved_beside(&manifest, name, &listed, input)?;
        said.push('\n');
        said += &saved_beside(&manifest, name, input, &own)?;
        said.push('\n');
        if let Ok(list) = serde_json::from_slice::<List>(input) {
            said += &saved_beside(&manifest, name, &list.signed(), &own)?;
            said.push('\n');
        }
    }
    Ok(said)
}

/// A save into the checkpoint, beside a generation with this mark and below this list: only what
/// both call the checkpoint's own is removed, and a refused save has changed nothing.
fn saved_beside(manifest: &Manifest, name: &str, list: &[u8], mark: &[u8]) -> Outcome {
    let in_words = |error: std::io::Error| error.to_string();
    let disk = checkpoint(manifest).map_err(in_words)?;
    let place = Path::new(FOLDER).join(name);
    let mut made = disk.create_folder(&place);
    made = made.and_then(|()| disk.write_new(&place.join("mark.json"), mark));
    made = made.and_then(|()| disk.write_new(&place.join("shard-00009.safetensors"), b"own"));
    made = made.and_then(|()| {
        let list_of_all = Path::new(FOLDER).join(".fusestep-generations");
        disk.write_new(&list_of_all, list)
    });
    made.map_err(in_words)?;
    let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
    let before = content(&disk);
    let saved = manifest.reshard(folder, folder, 2);
    let kept = disk.read(&place.join("shard-00009.safetensors")).is_ok();
    let is_own = |text: &[u8]| names(text, &manifest.checkpoint);
    let may_go = is_own(mark) && is_own(list);
    if !kept && !may_go {
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
        Err(error) if content(&disk) == before => Ok(error.to_string()),
        Err(error) => Err(format!("refused, and changed all the same: {error}")),
    }
}

/// Whether a mark or a list has the checkpoint's id among its texts, however they are written.
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
    disk.write_new(&generation.join("mark.json"), &mark_of(manifest))?;
    Ok(disk)
}

/// A mark of the checkpoint as the first ones were, which have no checksum.
fn mark_of(manifest: &Manifest) -> Vec<u8> {
    let mark = serde_json::json!({
        "format": "fusestep-generation",
        "checkpoint": manifest.checkpoint,
    });
    mark.to_string().into_bytes()
}
