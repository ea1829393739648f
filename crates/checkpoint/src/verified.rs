//! Whole checkpoints whose state a run can have produced.

use std::path::Path;

use fusestep_planner::PlanError;
use fusestep_tensor::{DType, Role};

use crate::manifest::Manifest;
use crate::refusal::refuse;
use crate::values::{CHECKED, SavedTensors, WholeTensors, check};
use crate::{CheckpointFolder, Result};

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
    /// Names of the parameters that have such values.
    pub params_non_finite: Vec<String>,
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
        let (manifest, tensors) = Self::read(folder)?.read_newest(folder)?;
        check_state(folder.path, &manifest, &tensors)?;
        // Writers note state alone; parameters are told of as they are.
        let params = manifest.tensors.iter().filter(|(name, _)| role_of(name).is_none());
        let params = params.filter(|(name, spec)| spec.dtype.non_finite(tensors.bytes(name)) > 0);
        let params_non_finite = params.map(|(name, _)| name.clone()).collect();
        let non_finite = tensors.non_finite.into_keys().collect();
        Ok(Verified { manifest, tensors: tensors.whole, non_finite, params_non_finite })
    }
}

/// Refuses state with values that no run produces.
pub(crate) fn check_state(
    folder: &Path,
    manifest: &Manifest,
    tensors: &SavedTensors,
) -> Result<()> {
    for (name, spec) in &manifest.tensors {
        if let Some(role) = role_of(name) {
            check_tensor(folder, tensors, name, role, spec.dtype)?;
        }
    }
    Ok(())
}

/// The role of a tensor of state, by its name in a checkpoint: `<name>@<role>`, or with `#<rank>`.
fn role_of(tensor: &str) -> Option<Role> {
    let (_, suffix) = tensor.rsplit_once('@')?;
    let name = suffix.split_once('#').map_or(suffix, |(name, _)| name);
    let mut checked = CHECKED.into_iter().flat_map(|role| [Some(role), role.units()]).flatten();
    checked.find(|role| role.name() == name)
}

/// Refuses a tensor with values that no run produces.
pub(crate) fn check_tensor(
    folder: &Path,
    tensors: &SavedTensors,
    tensor: &str,
    role: Role,
    dtype: DType,
) -> Result<(), PlanError> {
    let checked = check(role, dtype, tensors.bytes(tensor), tensors.noted(tensor));
    checked.map_err(|(expected, found)| refuse(folder, tensor, &expected, found))
}
