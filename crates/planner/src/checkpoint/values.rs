//! Which values optimizer state can have.

use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

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
    let expected = format!("{noted} values that are not finite, as the file says");
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
