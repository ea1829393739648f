//! Which values optimizer state can have. What is infinite or NaN because a run has made it so is
//! counted by its writer, and readers take no others.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use fusestep_tensor::{DType, Quoted, Role};
use fusestep_tensor_file::TensorFile;
use half::{bf16, f16};

use super::CheckpointFolder;
use super::file_sums::non_finite_key;
use super::manifest::{Manifest, refuse};
use super::shard_file::TensorPart;
use super::shards::WholeTensors;
use crate::PlanError;

/// Values that cannot be: what was expected, and what was found.
pub(super) type Refused = (String, String);

/// Roles whose values readers look at. Masters may be anything that parameters may be.
pub(super) const CHECKED: [Role; 6] =
    [Role::Moment1, Role::Moment2, Role::MaxMoment2, Role::Velocity, Role::Sum, Role::Base];

fn is_checked(role: Role) -> bool {
    CHECKED.contains(&role)
}

/// Refuses what no run leaves behind: negative values where squares are added up, and values that
/// are not finite unless their writer has seen as many, which `noted` says.
pub(super) fn check(role: Role, dtype: DType, bytes: &[u8], noted: u64) -> Result<(), Refused> {
    if !is_checked(role) {
        return Ok(());
    }
    let negative = matches!(role, Role::Moment2 | Role::MaxMoment2 | Role::Sum);
    let wrong = |value: &f64| (noted == 0 && !value.is_finite()) || (negative && *value < 0.0);
    let first = values(dtype, bytes).enumerate().find(|(_, value)| wrong(value));
    if let Some((at, value)) = first {
        let finite = if noted == 0 { "finite values" } else { "values" };
        let least = if negative { " of at least 0" } else { "" };
        return Err((format!("{finite}{least}"), format!("{value} at element {at}")));
    }
    if noted == 0 {
        return Ok(());
    }
    let found = non_finite(dtype, bytes);
    if found == noted {
        return Ok(());
    }
    let values = if noted == 1 { "value that is" } else { "values that are" };
    let expected = format!("{noted} {values} not finite, as the file says");
    Err((expected, found.to_string()))
}

fn values(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f64> {
    let value: fn(&[u8]) -> Option<f64> = match dtype {
        DType::F32 => |bytes| Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
        DType::F64 => |bytes| Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        DType::F16 => |bytes| Some(f16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        DType::BF16 => |bytes| Some(bf16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        _ => |_| None,
    };
    bytes.chunks_exact(dtype.len_bytes()).filter_map(value)
}

/// How many values of a role's tensor are infinite or NaN; 0 for roles that readers do not look at.
pub(super) fn non_finite_of(role: Role, dtype: DType, bytes: &[u8]) -> u64 {
    if is_checked(role) { non_finite(dtype, bytes) } else { 0 }
}

/// How many values are infinite or NaN.
///
/// # Cost
/// One pass over the bytes, without a branch for each.
pub(super) fn non_finite(dtype: DType, bytes: &[u8]) -> u64 {
    fn with<const N: usize>(bytes: &[u8], is: impl Fn([u8; N]) -> bool) -> u64 {
        let (elements, _) = bytes.as_chunks::<N>();
        elements.iter().map(|element| u64::from(is(*element))).sum()
    }
    // All bits of the exponent are set in what is not finite.
    let of_16_bits = |exponent: u16| {
        with(bytes, move |element| u16::from_le_bytes(element) & exponent == exponent)
    };
    match dtype {
        DType::F32 => with(bytes, |element| !f32::from_le_bytes(element).is_finite()),
        DType::F64 => with(bytes, |element| !f64::from_le_bytes(element).is_finite()),
        DType::F16 => of_16_bits(0x7c00),
        DType::BF16 => of_16_bits(0x7f80),
        _ => 0,
    }
}

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
