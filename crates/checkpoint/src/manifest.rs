//! Checkpoint as a folder: shards are written first, the manifest last. The old checkpoint is kept
//! until the new one is whole.
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
use std::path::Path;

use fusestep_planner::{MAX_STEPS, PlanError};
use fusestep_tensor::{DType, Quoted, Shape};
use fusestep_tensor_file::object_entries;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::Result;
use crate::names::checksum;
use crate::refusal::refuse;
use crate::{CheckpointFolder, OpenRun};

pub(crate) const MANIFEST: &str = "manifest.json";
/// Value of the field `format` in every manifest.
pub(crate) const FORMAT: &str = "fusestep-checkpoint";
/// Most bytes of a file's name, as file systems have it.
const MAX_NAME_BYTES: usize = 255;
/// Version that is written, and the newest that is read.
pub(crate) const VERSION: u32 = 5;
/// First version with a checksum, marks and the rules' directions.
const VERSION_CHECKED: u32 = 3;

/// Manifest of a checkpoint: its counts, settings and tensors, and the files that hold them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name of the format, `fusestep-checkpoint`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// xxh3 of the manifest as compact JSON with this field empty, in hexadecimal; from version 3
    /// on.
    #[serde(default)]
    pub xxh3: String,
    /// The checkpoint's number in hexadecimal, also in the marks of its generations; from version 3
    /// on.
    #[serde(default)]
    pub checkpoint: String,
    /// The update rule.
    pub optimizer: String,
    /// Direction of the rule's steps, against the gradient or along it, where the rule offers both;
    /// from version 3 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<String>,
    /// Rules of parameters that have one of their own; from version 3 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub optimizer_of: BTreeMap<String, String>,
    /// Settings that decide bits, such as `beta1`, and for parameters with a rule of their own
    /// `beta1@<name>`; from version 5 on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// Schedule that multiplied the learning rates, as text, if there was one.
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
    /// Values that belong to single ranks, if there are any; from version 2 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<OpenRun>,
    /// Texts of the caller, such as its place in its data.
    pub caller: BTreeMap<String, String>,
    /// Whole tensors, `<name>@<role>`.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// The folder of this generation's files.
    pub generation: String,
    /// Files of the generation.
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
            let above = folder.path.parent().unwrap_or(folder.path).join(MANIFEST);
            let found = match folder.files.kind(&above) {
                Ok(_) => "no such file, but one in the folder above; give that folder",
                Err(_) => "no such file",
            };
            refuse(&path, "manifest", expected, found)
        })
    }

    /// Reads the manifest of a checkpoint, as [`Manifest::read`]; `None` if there is no manifest.
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
        /// Fields that every version has.
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
        let mut manifest: Self = serde_json::from_slice(bytes).map_err(|error| {
            refuse(path, "manifest", "the fields of a known version", Quoted(&error.to_string()))
        })?;
        if let Some((scale, ..)) = &mut manifest.loss_scale {
            *scale = exact_scale(bytes).unwrap_or(*scale);
        }
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Refuses a manifest that was changed since it was written, or whose names lead out of the
    /// folder.
    fn check(&self, path: &Path) -> Result<()> {
        // A manifest with a checksum is held to it, whatever its version.
        if self.version >= VERSION_CHECKED || !self.xxh3.is_empty() {
            let found = self.checksum(path)?;
            if found != self.xxh3 {
                let expected = match self.xxh3.as_str() {
                    "" => "fields and their checksum `xxh3`, which every version from 3 on has"
                        .to_owned(),
                    sum => format!("fields with checksum {}, as they were written", Quoted(sum)),
                };
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

    pub(crate) fn checksum(&self, path: &Path) -> Result<String> {
        let unsigned = Self { xxh3: String::new(), ..self.clone() };
        let text = serde_json::to_vec(&unsigned).map_err(|error| no_json(path, &error))?;
        Ok(checksum(&text))
    }

    /// Hash of the manifest, which tells it from any other; never 0.
    pub(crate) fn fingerprint(&self) -> u64 {
        let text = serde_json::to_vec(self).unwrap_or_default();
        xxh3_64(&text).max(1)
    }

    /// Whether the manifest's version has a checksum and the direction of steps.
    pub(crate) fn has_checksum(&self) -> bool {
        self.version >= VERSION_CHECKED
    }
}

/// The loss scale to its last bit. `serde_json` reads it so with the feature `float_roundtrip`
/// only, which would change all of a user's program.
fn exact_scale(manifest: &[u8]) -> Option<f64> {
    let entries = object_entries(std::str::from_utf8(manifest).ok()?)?;
    let (_, counts) = entries.into_iter().find(|(name, _)| name == "loss_scale")?;
    counts.strip_prefix('[')?.split(',').next()?.trim().parse().ok()
}

pub(crate) fn no_json(path: &Path, error: &serde_json::Error) -> PlanError {
    refuse(path, "manifest", "values that JSON can hold", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = r#"{"format":"fusestep-checkpoint","version":5,"optimizer":"adam",
        "step":1,"skipped":0,"loss_scale":null,"steps_of":{},"caller":{},"tensors":{},
        "generation":"step-00000001-a","shards":[]}"#;

    #[test]
    fn a_loss_scale_is_read_to_its_last_bit() {
        let path = Path::new("manifest.json");
        let mut bits = 1u64;
        let mut random = || {
            bits = bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            f64::from_bits(bits >> 1)
        };
        let edges = [65_536.0, 0.1 + 0.2, 5e-324, f64::MIN_POSITIVE, f64::MAX];
        let scales = edges.into_iter().chain((0..2_000).map(|_| random()));
        for scale in scales.filter(|scale| scale.is_finite()) {
            let mut manifest: Manifest = serde_json::from_str(EMPTY).unwrap();
            manifest.loss_scale = Some((scale, 3, 4));
            manifest.xxh3 = manifest.checksum(path).unwrap();
            for text in [serde_json::to_vec(&manifest), serde_json::to_vec_pretty(&manifest)] {
                let found = Manifest::parse(path, &text.unwrap()).unwrap();
                assert_eq!(found.loss_scale, Some((scale, 3, 4)));
            }
        }
    }
}
