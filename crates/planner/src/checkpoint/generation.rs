//! The folders of a checkpoint's files, of which one counts: whose they are, and which may be
//! written and removed.

use std::io::ErrorKind;
use std::path::Path;

use fusestep_tensor_file::{FileKind, Prepared, is_part};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::CheckpointFolder;
use super::begun::Begun;
use super::manifest::{Manifest, refuse, sync};
use super::place::check_path;
use crate::Result;

/// Name of the mark in a generation's folder.
const MARK: &str = "mark.json";
/// What every mark begins with.
const FORMAT: &str = "fusestep-generation";
/// Version of marks that is written, and the newest that is read.
const VERSION: u32 = 1;

/// Name of the file of whole parameters.
pub(super) const MODEL_FILE: &str = "model.safetensors";

/// Suffixes of generations of one step: two saves of it never write to one place.
const TURNS: [&str; 2] = ["a", "b"];

/// What says that a folder is a checkpoint's own.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Mark {
    format: String,
    /// 0 in the first marks, which had neither version nor checksum.
    #[serde(default)]
    version: u32,
    /// The checkpoint's, as its manifest has it.
    checkpoint: String,
    /// xxh3 of the mark as compact JSON with this field empty.
    #[serde(default)]
    xxh3: String,
}

impl Mark {
    fn sum(&self) -> String {
        let unsigned = Self { xxh3: String::new(), ..self.clone() };
        checksum(&serde_json::to_vec(&unsigned).unwrap_or_default())
    }

    fn is_known(&self) -> bool {
        let first = self.version == 0 && self.xxh3.is_empty();
        let checked = self.version <= VERSION && self.xxh3 == self.sum();
        self.format == FORMAT && (first || checked)
    }
}

/// Where the next save goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Generation {
    pub(super) checkpoint: u64,
    pub(super) step: u64,
    pub(super) turn: usize,
}

impl Generation {
    pub(super) fn name(&self) -> String {
        format!("step-{:08}-{}", self.step, TURNS[self.turn])
    }

    /// What manifest and mark say.
    pub(super) fn checkpoint(&self) -> String {
        format!("{:016x}", self.checkpoint)
    }

    /// Finds a free name, makes the folder and marks it as this checkpoint's; one process does that
    /// for all ranks.
    ///
    /// # Errors
    /// [`crate::PlanError::Checkpoint`] if the manifest there is not ours or damaged, or if both
    /// names are taken by folders that this checkpoint has not made; nothing has been changed then.
    pub(super) fn begin(folder: CheckpointFolder<'_>, step: u64) -> Result<Self> {
        check_path(folder.path)?;
        make_folder(folder, folder.path)?;
        let previous = Manifest::read_if_any(folder)?;
        if previous.is_some() {
            // A save that was cut off behind its rename may have left a manifest that a loss of
            // power takes back. Its predecessor's files are written over below, so it
            // has to stay.
            sync(folder, folder.path)?;
        } else {
            // Whoever made the folder may have died before its name was durable.
            sync_names(folder)?;
        }
        folder.files.remove_abandoned(folder.path);
        let (checkpoint, begun) = Begun::of(folder, previous.as_ref())?;
        let of_turn = |turn| Self { checkpoint, step, turn };
        let counts = previous.as_ref().map(|found| found.generation.as_str());
        for found in [0, 1].map(of_turn) {
            let name = found.name();
            if counts == Some(name.as_str()) || !found.is_free(folder, &begun)? {
                continue;
            }
            // What saves have left that died may be all that there is room for. Where none of it
            // was worth keeping the checkpoint's number has gone, too.
            remove_but(folder, (&found.checkpoint(), counts), None);
            let (checkpoint, mut begun) = Begun::of(folder, previous.as_ref())?;
            let generation = Self { checkpoint, ..found };
            begun.add(&name);
            begun.write(folder)?;
            let made = generation.make(folder);
            made.inspect_err(|_| remove_failed(folder, &generation))?;
            return Ok(generation);
        }
        let names = [0, 1].map(|turn| of_turn(turn).name()).join(" and ");
        let found = match previous {
            Some(_) => format!(
                "{names}, of which this checkpoint has made one at most; move the other, or choose \
                 another folder"
            ),
            None => format!(
                "{names}, and no manifest.json that says whose they are; put it back if it was \
                 moved, else move them, or choose another folder"
            ),
        };
        Err(refuse(folder.path, "generation", "a free name", found))
    }

    /// Whether a folder may be written: there is none, or an empty one, or one that this checkpoint
    /// has begun and marked.
    fn is_free(&self, folder: CheckpointFolder<'_>, begun: &Begun) -> Result<bool> {
        let path = folder.join(&self.name());
        match folder.files.kind(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
            Err(error) => {
                return Err(refuse(&path, "folder", "one that can be looked at", error));
            }
            Ok(FileKind::Folder) => {}
            Ok(_) => return Ok(false),
        }
        Ok(match read_mark(folder, &self.name()) {
            Some(mark) => mark.checkpoint == begun.checkpoint && begun.has(&self.name()),
            None => is_unused(folder, &path),
        })
    }

    /// Makes the folder, empties it of what an earlier try has left and marks it.
    fn make(&self, folder: CheckpointFolder<'_>) -> Result<()> {
        let path = folder.join(&self.name());
        make_folder(folder, &path)?;
        remove_shards(folder, &path);
        let mut mark = Mark {
            format: FORMAT.to_owned(),
            version: VERSION,
            checkpoint: self.checkpoint(),
            xxh3: String::new(),
        };
        mark.xxh3 = mark.sum();
        let text = serde_json::to_vec(&mark).unwrap_or_default();
        Ok(Prepared::bytes_in(folder.files, &path.join(MARK), &text)?.commit()?)
    }

    /// Looks for the mark of rank 0.
    ///
    /// # Errors
    /// [`crate::PlanError::Checkpoint`] if this rank does not see the folder that rank 0 has made.
    pub(super) fn check_seen(&self, folder: CheckpointFolder<'_>) -> Result<()> {
        let path = folder.join(&self.name());
        let seen = folder.kind_soon(&path.join(MARK));
        let mark = read_mark(folder, &self.name());
        if seen.is_ok() && mark.is_some_and(|mark| mark.checkpoint == self.checkpoint()) {
            return Ok(());
        }
        let expected = "a folder that all ranks see, as rank 0 has made it; save to a file system \
                        that they share";
        let found = seen.err().map_or_else(|| "another one".to_owned(), |error| error.to_string());
        Err(refuse(&path, MARK, expected, found))
    }
}

/// Makes a folder, and those above it, and their names durable; nothing if it is there.
fn make_folder(folder: CheckpointFolder<'_>, path: &Path) -> Result<()> {
    let missing = path.ancestors().take_while(|path| folder.is_missing(path));
    let made: Vec<&Path> = missing.collect();
    folder.files.create_folder(path).map_err(|error| {
        let expected = "one that can be made";
        refuse(path, "folder", expected, error)
    })?;
    for above in made.iter().rev().filter_map(|path| path.parent()) {
        sync(folder, or_this(above))?;
    }
    Ok(())
}

/// Makes the names of the checkpoint's folder and of those above it durable, as far as they may be
/// read.
fn sync_names(folder: CheckpointFolder<'_>) -> Result<()> {
    for above in folder.path.ancestors().skip(1).map(or_this) {
        match folder.files.sync_folder(above) {
            // One of another user, who has made it.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => break,
            Err(error) => {
                return Err(refuse(above, "folder", "one whose names can be made durable", error));
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// The folder that an empty path stands for, as those above a relative one end with.
fn or_this(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

pub(super) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:05}.safetensors")
}

pub(super) fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// Removes what a save has begun that has failed, so that a full disk is not full of that. All
/// ranks have stopped writing to it.
pub(super) fn remove_failed(folder: CheckpointFolder<'_>, generation: &Generation) {
    let Ok(manifest) = Manifest::read_if_any(folder) else {
        return;
    };
    let counts = manifest.as_ref().map(|manifest| manifest.generation.as_str());
    // An error may have come when its manifest was in place already.
    if counts != Some(generation.name().as_str()) {
        remove_but(folder, (&generation.checkpoint(), counts), None);
    }
}

/// Removes all generations that a checkpoint has begun but the one that counts. Nothing else in the
/// folder is touched, and what cannot be removed costs space only.
pub(super) fn remove_but(
    folder: CheckpointFolder<'_>,
    (checkpoint, counts): (&str, Option<&str>),
    previous: Option<&Manifest>,
) {
    let begun = Begun::read(folder).ok().flatten();
    let Some(begun) = begun.filter(|begun| begun.checkpoint == checkpoint) else {
        return;
    };
    let others = || {
        let mut names = begun.there(folder);
        names.retain(|name| Some(name.as_str()) != counts);
        names
    };
    for name in others() {
        let marked = read_mark(folder, &name).is_some_and(|mark| mark.checkpoint == checkpoint);
        // Older versions had no marks; what they made is what their manifest names.
        let named = previous
            .is_some_and(|manifest| manifest.checkpoint.is_empty() && manifest.generation == name);
        let path = folder.join(&name);
        if marked || named || is_unused(folder, &path) {
            remove_shards(folder, &path);
            let left = folder.files.list(&path).unwrap_or_default();
            // With a stranger's file in it the mark stays, too; and it goes only once the shards
            // are gone for good, for shards without a mark are taken for a stranger's.
            if left.iter().all(|name| name == MARK) && sync(folder, &path).is_ok() {
                for name in left {
                    let _ = folder.files.remove_file(&path.join(name));
                }
                if counts.is_none() {
                    // The checkpoint's number goes with the list; a later folder of this name must
                    // not get its mark back.
                    let _ = sync(folder, &path);
                }
                let _ = folder.files.remove_folder(&path);
            }
        }
    }
    // Without the one that counts: should its manifest be moved away, it is nobody's to remove.
    let left = others();
    begun.keep(left, folder);
}

/// Whether a folder has nothing in it but what a save that died was writing.
fn is_unused(folder: CheckpointFolder<'_>, path: &Path) -> bool {
    let names = folder.files.list(path);
    names.is_ok_and(|names| names.iter().all(|name| is_part(name)))
}

/// Removes the files of a generation that a save has written.
fn remove_shards(folder: CheckpointFolder<'_>, path: &Path) {
    for name in folder.files.list(path).unwrap_or_default() {
        if is_shard(&name) || is_part(&name) || name == MODEL_FILE {
            let _ = folder.files.remove_file(&path.join(name));
        }
    }
}

fn read_mark(folder: CheckpointFolder<'_>, generation: &str) -> Option<Mark> {
    let bytes = folder.files.read(&folder.join(generation).join(MARK)).ok()?;
    let mark: Mark = serde_json::from_slice(&bytes).ok()?;
    mark.is_known().then_some(mark)
}

/// Whether a name is one that [`Generation::name`] gives.
pub(super) fn is_name(name: &str) -> bool {
    let step = name.strip_prefix("step-").and_then(|rest| rest.rsplit_once('-'));
    step.is_some_and(|(step, turn)| {
        step.len() >= 8 && step.bytes().all(|byte| byte.is_ascii_digit()) && TURNS.contains(&turn)
    })
}

/// Whether a name is one that [`shard_file`] gives.
fn is_shard(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".safetensors"));
    number
        .is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_save_gives_are_known() {
        for (name, known) in [
            ("step-00000012-a", true),
            ("step-123456789-b", true),
            ("step-1000", false),
            ("step-by-step-a", false),
            ("step-00000012-c", false),
            ("step-00000012-a.bak", false),
            ("step-12-a", false),
        ] {
            assert_eq!(is_name(name), known, "{name}");
        }
        assert!(is_shard(&shard_file(0)) && is_shard(&shard_file(123_456)));
        assert!(!is_shard("shard-1.safetensors") && !is_shard("shard-00000.json"));
        let generation = Generation { checkpoint: 1, step: 12, turn: 1 };
        assert!(is_name(&generation.name()));
    }
}
