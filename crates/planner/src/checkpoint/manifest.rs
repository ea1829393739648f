//! A checkpoint as a folder: shards first, the manifest last, the old one kept until the new one is
//! whole.
//!
//! ```text
//! DIR/manifest.json              names the generation that counts, its files and their checksums;
//!                                has one of its own
//! DIR/step-00000012-a/           a generation
//!     mark.json                  says whose it is: nothing without it is written over or removed
//!     model.safetensors          whole parameters under their own names, for any program; metadata
//!                                say what they are called in the checkpoint
//!     shard-00000.safetensors    ranges of tensors, `<name>@<role>`, and where each begins; a
//!                                rank's further ranges of a tensor are `<name>@<role>~<n>`, and
//!                                metadata say whose they are
//! DIR/lock                       held by the run that saves here
//! ```

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use fusestep_tensor::{DType, Quoted, Shape};
use fusestep_tensor_file::Prepared;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::generation::{self, Generation};
use super::{CheckpointFolder, OpenRun};
use crate::state::MAX_STEPS;
use crate::{PlanError, Result};

const MANIFEST: &str = "manifest.json";
/// What every manifest begins with.
pub(super) const FORMAT: &str = "fusestep-checkpoint";
/// Most bytes of a file's name, as file systems have it.
const MAX_NAME_BYTES: usize = 255;
/// Version that is written, and the newest that is read.
pub(super) const VERSION: u32 = 5;
/// First version with a checksum, marks and the rules' directions.
const VERSION_CHECKED: u32 = 3;

/// What a checkpoint holds, and in which files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `fusestep-checkpoint`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// xxh3 of the manifest as compact JSON with this field empty, in hexadecimal; from version 3
    /// on.
    #[serde(default)]
    pub xxh3: String,
    /// What the marks of this checkpoint's generations say; from version 3 on.
    #[serde(default)]
    pub checkpoint: String,
    /// The update rule.
    pub optimizer: String,
    /// Whether its steps go against the gradient or along it, where the rule offers both; from
    /// version 3 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<String>,
    /// Rules of parameters that have one of their own; from version 3 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub optimizer_of: BTreeMap<String, String>,
    /// Settings under which the state would mean something else, such as `beta1`, and of
    /// parameters with a rule of their own `beta1@<name>`; from version 5 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// What multiplied the learning rates, as text, if anything did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Steps run.
    pub step: u64,
    /// Steps skipped.
    pub skipped: u64,
    /// The loss scale and its counters of good and bad steps, if the loss is scaled.
    pub loss_scale: Option<(f64, u32, u32)>,
    /// Parameters that have missed steps, and the steps they have taken.
    pub steps_of: BTreeMap<String, u64>,
    /// What belongs to single ranks, if there is any; from version 2 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<OpenRun>,
    /// Texts of the caller's: where in its data it was.
    pub caller: BTreeMap<String, String>,
    /// Whole tensors, `<name>@<role>`.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// The folder of this generation's files.
    pub generation: String,
    /// Its files.
    pub shards: Vec<ShardSpec>,
}

/// A whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSpec {
    /// Name in the generation's folder.
    pub file: String,
    /// Length in bytes.
    pub len_bytes: u64,
    /// xxh3 of all bytes, in hexadecimal.
    pub xxh3: String,
}

impl Manifest {
    /// Reads the manifest of a checkpoint.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if there is none, or it is damaged, of a newer version, or no
    /// manifest of ours.
    pub fn read<'a>(folder: impl Into<CheckpointFolder<'a>>) -> Result<Self> {
        let folder = folder.into();
        Self::read_if_any(folder)?.ok_or_else(|| {
            let expected =
                "a manifest, which is written last; without it a checkpoint is not complete";
            let path = folder.join(MANIFEST);
            refuse(&path, "manifest", expected, "no such file")
        })
    }

    /// As [`Manifest::read`], but `None` if there is no manifest.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn read_if_any<'a>(folder: impl Into<CheckpointFolder<'a>>) -> Result<Option<Self>> {
        let folder = folder.into();
        let bytes = folder.read_if_any(MANIFEST, "manifest")?;
        let parsed = bytes.map(|bytes| Self::parse(&folder.join(MANIFEST), &bytes));
        parsed.transpose()
    }

    /// Checks a manifest's bytes.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        /// What every version has.
        #[derive(Deserialize)]
        struct Version {
            format: String,
            version: u64,
        }
        // Version first: a newer format need not have the fields that this one has.
        let version: Version = serde_json::from_slice(bytes).map_err(|error| {
            let expected = "JSON with a format and a version; another program's file is left alone";
            refuse(path, "manifest", expected, Quoted(&error.to_string()))
        })?;
        if version.format != FORMAT {
            return Err(refuse(path, "format", FORMAT, Quoted(&version.format)));
        }
        if version.version > u64::from(VERSION) {
            let expected = format!("at most {VERSION}; use a newer fusestep");
            return Err(refuse(path, "version", &expected, version.version));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| {
            refuse(path, "manifest", "the fields of a known version", Quoted(&error.to_string()))
        })?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Refuses what was changed since it was written, and names that lead out of the folder.
    fn check(&self, path: &Path) -> Result<()> {
        // One that has a checksum is held to it, whatever version it says it is of.
        if self.version >= VERSION_CHECKED || !self.xxh3.is_empty() {
            let found = self.checksum(path)?;
            if found != self.xxh3 {
                let expected =
                    format!("fields with checksum {}, as they were written", Quoted(&self.xxh3));
                return Err(refuse(path, "manifest", &expected, found));
            }
        }
        let plain = |name: &str| {
            let has_length = (1..=MAX_NAME_BYTES).contains(&name.len());
            has_length && !name.contains(['/', '\\']) && !name.starts_with('.')
        };
        let shards = self.shards.iter().map(|shard| &shard.file);
        if let Some(name) =
            std::iter::once(&self.generation).chain(shards).find(|name| !plain(name))
        {
            let expected = format!("a name within the folder, of {MAX_NAME_BYTES} bytes at most");
            return Err(refuse(path, "file name", &expected, Quoted(name)));
        }
        if self.step > MAX_STEPS || self.skipped > MAX_STEPS {
            let expected = format!("{MAX_STEPS} at most");
            let found = format!("{} steps, {} skipped", self.step, self.skipped);
            return Err(refuse(path, "step", &expected, found));
        }
        Ok(())
    }

    fn checksum(&self, path: &Path) -> Result<String> {
        let unsigned = Self { xxh3: String::new(), ..self.clone() };
        let text = serde_json::to_vec(&unsigned).map_err(|error| no_json(path, &error))?;
        Ok(generation::checksum(&text))
    }

    /// A number that another manifest has not; never 0.
    pub(super) fn fingerprint(&self) -> u64 {
        let text = serde_json::to_vec(self).unwrap_or_default();
        xxh3_64(&text).max(1)
    }

    /// Whether it is held to a checksum of its own, and says in which direction steps go.
    pub(super) fn has_checksum(&self) -> bool {
        self.version >= VERSION_CHECKED
    }

    /// Fills in the files that all ranks have written, looks for them, and makes this the manifest
    /// that counts.
    pub(super) fn commit_to(
        mut self,
        folder: CheckpointFolder<'_>,
        generation: &Generation,
        shards: Vec<ShardSpec>,
    ) -> Result<()> {
        self.generation = generation.name();
        self.checkpoint = generation.checkpoint();
        self.shards = shards;
        let seen = self.check_shards_seen(folder);
        let committed = seen.and_then(|()| self.commit(folder));
        let committed = committed.inspect_err(|_| generation::remove_failed(folder, generation));
        committed.map(drop)
    }

    /// Makes this the manifest that counts, then removes this checkpoint's other generations.
    pub(super) fn commit(mut self, folder: CheckpointFolder<'_>) -> Result<Self> {
        let path = folder.join(MANIFEST);
        // What is replaced must be this checkpoint's own.
        let previous = Self::read_if_any(folder)?;
        // The generation's own name must be on disk before anything refers to it.
        sync(folder, folder.path)?;
        self.version = VERSION;
        self.xxh3 = self.checksum(&path)?;
        let text = serde_json::to_vec_pretty(&self).map_err(|error| no_json(&path, &error))?;
        Prepared::bytes_in(folder.files, &path, &text)?.commit()?;
        let counts = Some(self.generation.as_str());
        generation::remove_but(folder, (&self.checkpoint, counts), previous.as_ref());
        Ok(self)
    }
}

fn no_json(path: &Path, error: &serde_json::Error) -> PlanError {
    refuse(path, "manifest", "values that JSON can hold", error)
}

/// Writes the names in a folder to disk.
pub(super) fn sync(folder: CheckpointFolder<'_>, path: &Path) -> Result<()> {
    folder.files.sync_folder(path).map_err(|error| {
        let expected = "one that can be synced";
        refuse(path, "folder", expected, error)
    })
}

pub(crate) fn refuse(
    path: &Path,
    what: &str,
    expected: impl Display,
    found: impl Display,
) -> PlanError {
    refusal(path, what, [&expected, &found])
}

// Not compiled for every pair of types.
fn refusal(path: &Path, what: &str, [expected, found]: [&dyn Display; 2]) -> PlanError {
    PlanError::Checkpoint {
        path: path.display().to_string(),
        what: what.to_owned(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
}
