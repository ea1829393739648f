//! Values that optimizer state can have. Writers count the infinite and NaN values that a run has
//! produced, and readers refuse any others.

use std::collections::BTreeMap;

use fusestep_planner::{PlanError, RunImage};
use fusestep_tensor::{DType, Quoted, Role};
use fusestep_tensor_file::TensorFile;
use half::{bf16, f16};

use crate::names::non_finite_key;
use crate::refusal::refuse;

/// Refusal of values: the values that were expected, and those that were found.
pub(crate) type Refused = (String, String);

/// Roles whose values readers check. Masters may have any values that parameters may have.
pub(crate) const CHECKED: [Role; 7] = [
    Role::Moment1,
    Role::Moment2,
    Role::MaxMoment2,
    Role::Velocity,
    Role::MaxGrad,
    Role::Sum,
    Role::Base,
];

fn is_checked(role: Role) -> bool {
    CHECKED.contains(&role.unit_of().unwrap_or(role))
}

/// Whether a role's values are never negative.
fn is_positive(role: Role) -> bool {
    matches!(role, Role::Moment2 | Role::MaxMoment2 | Role::MaxGrad | Role::Sum)
}

/// Refuses values that no run produces: negative sums of squares, and values that are not finite.
/// As many of the latter as `noted`, the writer's count, are allowed.
pub(crate) fn check(role: Role, dtype: DType, bytes: &[u8], noted: u64) -> Result<(), Refused> {
    if !is_checked(role) {
        return Ok(());
    }
    let negative = is_positive(role) || role.unit_of().is_some();
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
    let found = dtype.non_finite(bytes);
    if found == noted {
        return Ok(());
    }
    let values = if noted == 1 { "value that is" } else { "values that are" };
    let expected = format!("{noted} {values} not finite, as the file says");
    Err((expected, found.to_string()))
}

/// Refuses values where no step has been taken: optimizer state begins with zeros.
pub(crate) fn check_begun(role: Role, dtype: DType, bytes: &[u8]) -> Result<(), Refused> {
    let mut values = values(dtype, bytes).enumerate().filter(|_| is_checked(role));
    match values.find(|(_, value)| *value != 0.0) {
        Some((at, value)) => {
            let expected = "zeros, since no step has been taken".to_owned();
            Err((expected, format!("{value} at element {at}")))
        }
        None => Ok(()),
    }
}

/// Refuses codes that no step leaves: those of what is never negative are at least 1.
pub(crate) fn check_taken(role: Role, dtype: DType, bytes: &[u8]) -> Result<(), Refused> {
    if dtype != DType::U8 || !is_positive(role) {
        return Ok(());
    }
    match bytes.iter().position(|code| *code == 0) {
        Some(at) => {
            let expected = "codes from 1 to 255, since a step has been taken".to_owned();
            Err((expected, format!("0 at element {at}")))
        }
        None => Ok(()),
    }
}

/// A list's elements as they are saved.
#[derive(Clone, Copy)]
pub(crate) struct SavedList<'a> {
    pub(crate) param: usize,
    pub(crate) role: Role,
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

/// Refuses to save state that [`check_begun`] would refuse on loading.
pub(crate) fn check_saved(image: &RunImage, list: SavedList<'_>) -> Result<(), Refused> {
    // Averages over ranks bring state to ranks that have taken no step themselves.
    let has_begun = image.counts.steps_of[list.param] > 0;
    if has_begun || image.counts.step > 0 && image.averages {
        return Ok(());
    }
    check_begun(list.role, list.dtype, list.bytes).map_err(|(expected, found)| {
        (expected, format!("{found}; set the steps that it has taken (`State::set_step`)"))
    })
}

fn values(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f64> {
    let value: fn(&[u8]) -> Option<f64> = match dtype {
        DType::F32 => |bytes| Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
        DType::F64 => |bytes| Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        DType::F16 => |bytes| Some(f16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        DType::BF16 => |bytes| Some(bf16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        // Codes: all that counts is which are 0.
        DType::U8 => |bytes| bytes.first().map(|code| f64::from(*code)),
        _ => |_| None,
    };
    bytes.chunks_exact(dtype.len_bytes()).filter_map(value)
}

/// The number of a tensor's values that are infinite or NaN; 0 for roles that readers do not check.
pub(crate) fn non_finite_of(role: Role, dtype: DType, bytes: &[u8]) -> u64 {
    if is_checked(role) { dtype.non_finite(bytes) } else { 0 }
}

/// Whole tensors of a checkpoint, by name.
pub type WholeTensors = BTreeMap<String, Vec<u8>>;

/// Tensors of a checkpoint as its writers have left them.
#[derive(Default)]
pub(crate) struct SavedTensors {
    /// Bytes of each tensor.
    pub(crate) whole: WholeTensors,
    /// Number of values that are not finite, by tensor, as the writers have noted.
    pub(crate) non_finite: BTreeMap<String, u64>,
}

impl SavedTensors {
    /// Bytes of a tensor; none of one that is not there.
    pub(crate) fn bytes(&self, tensor: &str) -> &[u8] {
        self.whole.get(tensor).map_or(&[][..], Vec::as_slice)
    }

    /// Number of a tensor's values that are not finite, as the writers have noted.
    pub(crate) fn noted(&self, tensor: &str) -> u64 {
        self.non_finite.get(tensor).copied().unwrap_or(0)
    }
}

/// The number that a file's metadata note for one of its entries, if they note one.
pub(crate) fn noted_in(file: &TensorFile, entry: &str) -> Result<Option<u64>, PlanError> {
    let key = non_finite_key(entry);
    let Some(text) = file.metadata().get(&key) else {
        return Ok(None);
    };
    let count =
        text.parse().map_err(|_| refuse(file.path(), &key, "a count of values", Quoted(text)))?;
    Ok(Some(count))
}
