//! Whole checkpoints whose state a run can have produced.

use std::path::Path;

use fusestep_tensor::{DType, Role};

use super::CheckpointFolder;
use super::manifest::Manifest;
use super::refusal::refuse;
use super::values::{CHECKED, NonFinite, WholeTensors, check};
use crate::PlanError;

/// A checkpoint whose files are as they were written, and whose state has values that a run can
/// produce.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Manifest of the checkpoint.
    pub manifest: Manifest,
    /// Tensors of the checkpoint.
    pub tensors: WholeTensors,
    /// Names of the state's tensors that have infinite or NaN values.
    pub non_finite: Vec<String>,
}

impl Manifest {
    /// Reads a whole checkpoint, compares it with its checksums, and checks that a run can have
    /// produced its state.
    ///
    /// # Errors
    /// As [`Manifest::read_whole`]; [`PlanError::Checkpoint`] naming a tensor with values that no
    /// run produces.
    pub fn verify<'a>(folder: impl Into<CheckpointFolder<'a>>) -> Result<Verified, PlanError> {
        let folder = folder.into();
        let (manifest, (tensors, noted)) = Self::read(folder)?.read_newest(folder)?;
        for (name, spec) in &manifest.tensors {
            if let Some(role) = role_of(name) {
                let place = (folder.path, name.as_str());
                check_tensor(place, (role, spec.dtype), (&tensors, &noted))?;
            }
        }
        Ok(Verified { manifest, tensors, non_finite: noted.into_keys().collect() })
    }
}

/// The role of a tensor of state, by its name in a checkpoint: `<name>@<role>`, or with `#<rank>`.
fn role_of(tensor: &str) -> Option<Role> {
    let (_, suffix) = tensor.rsplit_once('@')?;
    let name = suffix.split_once('#').map_or(suffix, |(name, _)| name);
    let mut checked = CHECKED.into_iter();
    checked.find(|role| role.name() == name)
}

/// Refuses a tensor with values that no run produces.
pub(super) fn check_tensor(
    (folder, tensor): (&Path, &str),
    (role, dtype): (Role, DType),
    (whole, noted): (&WholeTensors, &NonFinite),
) -> Result<(), PlanError> {
    let bytes = whole.get(tensor).map_or(&[][..], Vec::as_slice);
    let count = noted.get(tensor).copied().unwrap_or(0);
    let checked = check(role, dtype, bytes, count);
    checked.map_err(|(expected, found)| refuse(folder, tensor, &expected, found))
}
