//! List of the generations that a checkpoint has begun and not removed yet. A save may write over
//! and remove these generations and no others.
//!
//! The list is durable before a generation's folder is made. So the next save knows every folder of
//! a save that died, even before the first manifest.

use std::hash::{BuildHasher, Hasher, RandomState};

#[cfg(doc)]
use fusestep_planner::PlanError;
use fusestep_tensor_file::Prepared;
use serde::{Deserialize, Serialize};

use crate::CheckpointFolder;
use crate::Result;
use crate::manifest::Manifest;
use crate::names::{checksum, is_name};
use crate::place::sync;
use crate::refusal::refuse;

/// Name of the list in a checkpoint's folder; it is gone when nothing is left to remove.
const LIST: &str = ".fusestep-generations";
/// Value of the field `format` in every list.
const FORMAT: &str = "fusestep-generations";
/// Version that is written, and the newest that is read.
const VERSION: u32 = 1;

/// Generations of one checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begun {
    format: String,
    version: u32,
    /// The checkpoint's number, as in its manifest.
    pub(crate) checkpoint: String,
    generations: Vec<String>,
    /// xxh3 of the list as compact JSON with this field empty.
    xxh3: String,
}

impl Begun {
    /// The number of the checkpoint that has this manifest, and its list. Without a manifest, or
    /// with one of an old version without marks, the number comes from the list of the saves that
    /// died here. Without a list the number is new.
    ///
    /// # Errors
    /// As [`Begun::read`].
    pub(crate) fn of(
        folder: CheckpointFolder<'_>,
        manifest: Option<&Manifest>,
    ) -> Result<(u64, Self)> {
        let found = Self::read(folder)?;
        let named = manifest.into_iter().map(|manifest| &manifest.checkpoint);
        let known = named.chain(found.as_ref().map(|begun| &begun.checkpoint));
        let number = known.flat_map(|id| u64::from_str_radix(id, 16)).next();
        let number = number.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        let checkpoint = format!("{number:016x}");
        let mut begun =
            found.filter(|begun| begun.checkpoint == checkpoint).unwrap_or_else(|| Self {
                format: FORMAT.to_owned(),
                version: VERSION,
                checkpoint,
                generations: Vec::new(),
                xxh3: String::new(),
            });
        begun.generations = begun.there(folder);
        if let Some(manifest) = manifest {
            begun.add(&manifest.generation);
        }
        Ok((number, begun))
    }

    /// Reads the list; `None` if there is no list or a damaged one, and then the generations that
    /// it named stay.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if the list cannot be read, or is of a newer version.
    pub(crate) fn read(folder: CheckpointFolder<'_>) -> Result<Option<Self>> {
        let Some(bytes) = folder.read_if_any(LIST, "generations")? else {
            return Ok(None);
        };
        let read: Option<Self> = serde_json::from_slice(&bytes).ok();
        let Some(begun) = read.filter(|begun| begun.format == FORMAT) else {
            return Ok(None);
        };
        if begun.version > VERSION {
            let expected = format!("at most {VERSION}; use a newer fusestep");
            return Err(refuse(&folder.join(LIST), "version", &expected, begun.version));
        }
        Ok((begun.xxh3 == begun.sum()).then_some(begun))
    }

    /// Makes the list durable.
    pub(crate) fn write(mut self, folder: CheckpointFolder<'_>) -> Result<()> {
        self.xxh3 = self.sum();
        let text = serde_json::to_vec(&self).unwrap_or_default();
        Ok(Prepared::bytes_in(folder.files, &folder.join(LIST), &text)?.commit()?)
    }

    /// Shortens the list to these generations, once the removal of the others is durable. Without
    /// any generation the list's file is removed. What fails here is left to the next save.
    pub(crate) fn keep(mut self, generations: Vec<String>, folder: CheckpointFolder<'_>) {
        if sync(folder, folder.path).is_err() {
            return;
        }
        if generations.is_empty() {
            let _ = folder.files.remove_file(&folder.join(LIST));
        } else {
            self.generations = generations;
            let _ = self.write(folder);
        }
    }

    fn sum(&self) -> String {
        let unsigned = Self { xxh3: String::new(), ..self.clone() };
        checksum(&serde_json::to_vec(&unsigned).unwrap_or_default())
    }

    pub(crate) fn add(&mut self, generation: &str) {
        if is_name(generation) && !self.has(generation) {
            self.generations.push(generation.to_owned());
        }
    }

    pub(crate) fn has(&self, generation: &str) -> bool {
        self.generations.iter().any(|name| name == generation)
    }

    /// The generations whose folders are there.
    pub(crate) fn there(&self, folder: CheckpointFolder<'_>) -> Vec<String> {
        let is_there = |name: &&String| !folder.is_missing(&folder.join(name));
        let names = self.generations.iter().filter(|name| is_name(name));
        names.filter(is_there).cloned().collect()
    }
}
