//! Generations of a checkpoint: one folder of files for each save, of which the manifest names one.
//! Marks say which checkpoint a folder belongs to, and so whether a save may write or remove it.

use std::io::ErrorKind;
use std::path::Path;

#[cfg(doc)]
use fusestep_planner::PlanError;
use fusestep_tensor_file::{FileKind, Prepared, is_part, remove_abandoned_in};
use serde::{Deserialize, Serialize};

use crate::CheckpointFolder;
use crate::Result;
use crate::begun::Begun;
use crate::manifest::Manifest;
use crate::names::{MODEL_FILE, TURNS, checksum, is_shard};
use crate::place::{check_path, sync};
use crate::refusal::refuse;

/// Name of the mark in a generation's folder.
const MARK: &str = "mark.json";
/// Value of the field `format` in every mark.
const FORMAT: &str = "fusestep-generation";
/// Version of marks that is written, and the newest that is read.
const VERSION: u32 = 1;

/// Mark in a folder, which says which checkpoint has made the folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Mark {
    format: String,
    /// Version of the mark; 0 in the first marks, which had neither version nor checksum.
    #[serde(default)]
    version: u32,
    /// The checkpoint's number, as in its manifest.
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

/// Generation that a save writes: its checkpoint, its step and its suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    pub(crate) checkpoint: u64,
    pub(crate) step: u64,
    pub(crate) turn: usize,
}

impl Generation {
    pub(crate) fn name(&self) -> String {
        format!("step-{:08}-{}", self.step, TURNS[self.turn])
    }

    /// The checkpoint's number as manifest and mark have it, in hexadecimal.
    pub(crate) fn checkpoint(&self) -> String {
        format!("{:016x}", self.checkpoint)
    }

    /// Finds a free name, makes the folder and marks it as this checkpoint's; one process does this
    /// for all ranks.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if the manifest there is damaged or of another program, or
    /// if folders that this checkpoint has not made take both names. Nothing has been changed then.
    pub(crate) fn begin(folder: CheckpointFolder<'_>, step: u64) -> Result<Self> {
        check_path(folder.path)?;
        make_folder(folder, folder.path)?;
        let previous = Manifest::read_if_any(folder)?;
        if previous.is_some() {
            // A save that was cut off behind its rename may have left a manifest that a loss of
            // power takes back. Its predecessor's files are written over below, so it
            // has to stay.
            sync(folder, folder.path)?;
        } else {
            // The process that made the folder may have died before the folder's name was durable.
            sync_names(folder)?;
        }
        remove_abandoned_in(folder.files, folder.path);
        let (checkpoint, begun) = Begun::of(folder, previous.as_ref())?;
        let of_turn = |turn| Self { checkpoint, step, turn };
        let counts = previous.as_ref().map(|found| found.generation.as_str());
        for found in [0, 1].map(of_turn) {
            let name = found.name();
            if counts == Some(name.as_str()) || !found.is_free(folder, &begun)? {
                continue;
            }
            // Files of saves that died may fill the disk. If none of their generations counts, the
            // checkpoint's number goes with their list.
            remove_but(folder, &found.checkpoint(), counts, None);
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

    /// Whether this generation's folder may be written: it is missing, or empty, or this checkpoint
    /// has begun and marked it.
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

    /// Makes the folder, removes files that an earlier save has left in it, and marks it.
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
    /// [`PlanError::Checkpoint`] if this rank does not see the folder that rank 0 has made.
    pub(crate) fn check_seen(&self, folder: CheckpointFolder<'_>) -> Result<()> {
        let path = folder.join(&self.name());
        let mark = folder.kind_soon(&path.join(MARK)).and_then(|_| {
            let bytes = folder.files.read(&path.join(MARK))?;
            Ok(mark_of(&bytes))
        });
        let (expected, found) = match mark {
            Ok(Some(mark)) if mark.checkpoint == self.checkpoint() => return Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => {
                ("one that this rank can read", error.to_string())
            }
            other => (
                "a folder that all ranks see, as rank 0 has made it; save to a file system that \
                 they share",
                other.err().map_or_else(|| "another one".to_owned(), |error| error.to_string()),
            ),
        };
        Err(refuse(&path, MARK, expected, found))
    }
}

/// Makes a folder and missing folders above it, with durable names. Does nothing if the folder is
/// there.
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

/// Makes the names of the checkpoint's folder and of the folders above it durable, up to a folder
/// that this user may not read.
fn sync_names(folder: CheckpointFolder<'_>) -> Result<()> {
    for above in folder.path.ancestors().skip(1).map(or_this) {
        match folder.files.sync_folder(above) {
            // A folder of another user, who has made it.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => break,
            Err(error) => {
                return Err(refuse(above, "folder", "one whose names can be made durable", error));
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// The path itself, or `.` for an empty path, with which the ancestors of a relative path end.
fn or_this(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// Removes the generation of a save that has failed, to free its space on disk. All ranks have
/// stopped writing to it.
pub(crate) fn remove_failed(folder: CheckpointFolder<'_>, generation: &Generation) {
    let Ok(manifest) = Manifest::read_if_any(folder) else {
        return;
    };
    let counts = manifest.as_ref().map(|manifest| manifest.generation.as_str());
    // An error may have come when the save's manifest was in place already.
    if counts != Some(generation.name().as_str()) {
        remove_but(folder, &generation.checkpoint(), counts, None);
    }
}

/// Removes all generations that a checkpoint has begun, except the generation that `counts`, which
/// is the one that its manifest names. Nothing else in the folder is touched. A folder that cannot
/// be removed costs space only.
pub(crate) fn remove_but(
    folder: CheckpointFolder<'_>,
    checkpoint: &str,
    counts: Option<&str>,
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
        // Older versions wrote no marks; their manifest names the generation that they made.
        let named = previous
            .is_some_and(|manifest| manifest.checkpoint.is_empty() && manifest.generation == name);
        let path = folder.join(&name);
        if marked || named || is_unused(folder, &path) {
            remove_shards(folder, &path);
            let left = folder.files.list(&path).unwrap_or_default();
            // A foreign file in the folder keeps the mark. The mark goes only once the removal of
            // the shards is durable, for shards without a mark count as foreign.
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
    // The list leaves out the generation that counts: if its manifest is moved away, no save may
    // remove it.
    let left = others();
    begun.keep(left, folder);
}

/// Whether a folder holds nothing but unfinished files of a save that died.
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
    mark_of(&folder.files.read(&folder.join(generation).join(MARK)).ok()?)
}

fn mark_of(bytes: &[u8]) -> Option<Mark> {
    let mark: Mark = serde_json::from_slice(bytes).ok()?;
    mark.is_known().then_some(mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{is_name, shard_file};

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
