//! Which values optimizer state can have.

use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

/// What values of a role have in common, in words.
pub(super) fn possible(role: Role) -> &'static str {
    if is_never_negative(role) {
        "finite values of at least 0"
    } else {
        "finite values"
    }
}

/// The first element that no run leaves behind, and its value: one that is not finite, or is
/// negative where squares are added up. Masters may be anything that parameters may be.
pub(super) fn first_impossible(role: Role, dtype: DType, bytes: &[u8]) -> Option<(usize, f64)> {
    if matches!(
        role,
        Role::Param | Role::Grad | Role::Master | Role::Remainder
    ) {
        return None;
    }
    let value: fn(&[u8]) -> Option<f64> = match dtype {
        DType::F32 => |bytes| Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
        DType::F64 => |bytes| Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        DType::F16 => |bytes| Some(f16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        DType::BF16 => |bytes| Some(bf16::from_le_bytes(bytes.try_into().ok()?).to_f64()),
        _ => return None,
    };
    let values = bytes.chunks_exact(dtype.len_bytes()).filter_map(value);
    let negative = is_never_negative(role);
    let wrong = |value: &f64| !value.is_finite() || (negative && *value < 0.0);
    values.enumerate().find(|(_, value)| wrong(value))
}

fn is_never_negative(role: Role) -> bool {
    matches!(role, Role::Moment2 | Role::MaxMoment2 | Role::Sum)
}
