//! State that is infinite or NaN because a run has made it so: its writer says how many values, and
//! readers take no others.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use fusestep_tensor::{DType, Quoted, Role};
use fusestep_tensor_file::TensorFile;

use super::file_sums::non_finite_key;
use super::manifest::{Manifest, refuse};
use super::shard_file::TensorPart;
use super::shards::WholeTensors;
use super::{CheckpointFolder, values};
use crate::PlanError;

/// Of tensors, how many values are not finite, as their writers say.
pub(super) type NonFinite = BTreeMap<String, u64>;

/// A checkpoint whose files are as they were written, and whose state is one that a run can have.
#[derive(Clone, Debug)]
pub struct Verified {
    /// What it holds.
    pub manifest: Manifest,
    /// Its tensors.
    pub tensors: WholeTensors,
    /// Tensors of its state with values that are infinite or NaN.
    pub non_finite: Vec<String>,
}

impl Manifest {
    /// Reads a checkpoint whole and compares it with its checksums, and its state with what a run
    /// can have.
    ///
    /// # Errors
    /// As [`Manifest::read_whole`]; [`PlanError::Checkpoint`] naming a tensor that no run can go
    /// on from.
    pub fn verify<'a>(folder: impl Into<CheckpointFolder<'a>>) -> Result<Verified, PlanError> {
        let folder = folder.into();
        let (manifest, (tensors, noted)) = Self::read(folder)?.read_newest(folder)?;
        for (name, spec) in &manifest.tensors {
            if let Some(role) = role_of(name) {
                let place = (folder.path, name.as_str());
                check(place, (role, spec.dtype), (&tensors, &noted))?;
            }
        }
        Ok(Verified { manifest, tensors, non_finite: noted.into_keys().collect() })
    }
}

/// The role of a tensor of state, by its name in a checkpoint: `<name>@<role>`, or with `#<rank>`.
fn role_of(tensor: &str) -> Option<Role> {
    let (_, suffix) = tensor.rsplit_once('@')?;
    let name = suffix.split_once('#').map_or(suffix, |(name, _)| name);
    let mut checked = values::CHECKED.into_iter();
    checked.find(|role| role.name() == name)
}

/// Says of an entry of a file how many values are not finite, if any are.
pub(super) fn note(metadata: &mut HashMap<String, String>, entry: &str, part: &TensorPart<'_>) {
    if part.non_finite > 0 {
        metadata.insert(non_finite_key(entry), part.non_finite.to_string());
    }
}

/// Adds what a file says of one of its entries.
pub(super) fn read(
    (file, entry): (&TensorFile, &str),
    tensor: &str,
    noted: &mut NonFinite,
) -> Result<(), PlanError> {
    let key = non_finite_key(entry);
    let Some(text) = file.metadata().get(&key) else {
        return Ok(());
    };
    let count: u64 =
        text.parse().map_err(|_| refuse(file.path(), &key, "a count of values", Quoted(text)))?;
    let sum = noted.entry(tensor.to_owned()).or_default();
    *sum = sum.saturating_add(count);
    Ok(())
}

/// Refuses a tensor that no run leaves behind.
pub(super) fn check(
    (folder, tensor): (&Path, &str),
    (role, dtype): (Role, DType),
    (whole, noted): (&WholeTensors, &NonFinite),
) -> Result<(), PlanError> {
    let bytes = whole.get(tensor).map_or(&[][..], Vec::as_slice);
    let count = noted.get(tensor).copied().unwrap_or(0);
    let checked = values::check(role, dtype, bytes, count);
    checked.map_err(|(expected, found)| refuse(folder, tensor, &expected, found))
}
