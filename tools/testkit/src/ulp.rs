//! Distances in units in the last place.

/// The number of f32 values between `a` and `b`; 0 for two NaN, `u32::MAX` if only one is.
pub fn ulp_distance(a: f32, b: f32) -> u32 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => 0,
        (false, false) => key(a).abs_diff(key(b)),
        _ => u32::MAX,
    }
}

/// An integer that orders as f32 values do, with −0 next to +0.
fn key(value: f32) -> i32 {
    let bits = value.to_bits() as i32;
    if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_cross_zero_and_treat_nan_as_one_value() {
        assert_eq!(ulp_distance(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulp_distance(-0.0, 0.0), 0);
        assert_eq!(ulp_distance(-f32::from_bits(1), f32::from_bits(1)), 2);
        assert_eq!(ulp_distance(f32::NAN, -f32::NAN), 0);
        assert_eq!(ulp_distance(f32::NAN, 0.0), u32::MAX);
    }
}
