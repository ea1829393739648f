//! f16 and bf16 as plain integer and float operations without a branch, so that loops over them
//! become vector instructions.
//!
//! Widening is exact. Narrowing rounds once, to nearest even, keeps subnormals and makes every NaN
//! a quiet one. The bits are those of the `half` crate, but for the payload of widened NaN.
//! Conversions of single values in that crate ask each time what the processor can do, which no
//! loop profits from. Its conversions of f16 slices ask once and are faster than these; its
//! conversions of bf16 slices are slower.

const SIGN: u32 = 0x8000_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
/// The half of an f32 that is a bf16.
const UPPER: u32 = 0xffff_0000;
/// The bit that tells a quiet NaN.
const QUIET: u32 = 0x0040_0000;
/// The smallest normal f16, 2⁻¹⁴.
const F16_NORMAL: u32 = 113 << 23;
/// 65,536, the first power of two beyond f16.
const F16_OVERFLOW: u32 = 143 << 23;
/// 1/2, whose last place is the last place of f16's subnormals.
const HALF: u32 = 126 << 23;

/// The value of an f16.
#[inline(always)]
pub fn widen_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let shifted = u32::from(bits & 0x7fff) << 13;
    let normal = shifted + (112 << 23);
    // 2⁻¹⁴·(1 + m) − 2⁻¹⁴ is exact.
    let subnormal = f32::from_bits(shifted + F16_NORMAL) - f32::from_bits(F16_NORMAL);
    let not_finite = shifted + (224 << 23);
    let magnitude = if shifted >= 31 << 23 {
        not_finite
    } else if shifted < 1 << 23 {
        subnormal.to_bits()
    } else {
        normal
    };
    f32::from_bits(magnitude | sign)
}

/// The nearest f16, ties to even.
#[inline(always)]
pub fn narrow_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let odd = magnitude >> 13 & 1;
    // A carry out of the mantissa belongs into the exponent.
    let normal = (magnitude.wrapping_add(0xfff + odd) >> 13).wrapping_sub(112 << 10);
    // The sum's last place is that of subnormals, so the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits();
    let subnormal = subnormal.wrapping_sub(HALF);
    let nan = magnitude >> 13 & 0x3ff | 0x7e00;
    let narrow = if magnitude < F16_NORMAL { subnormal } else { normal };
    let narrow = if magnitude >= F16_OVERFLOW { 0x7c00 } else { narrow };
    let narrow = if magnitude > INFINITY { nan } else { narrow };
    (narrow | (bits & SIGN) >> 16) as u16
}

/// The value of a bf16.
#[inline(always)]
pub fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The values of the bf16 in the lower and in the upper half of a word.
#[inline(always)]
pub fn widen_bf16_pair(word: u32) -> [f32; 2] {
    [word << 16, word & UPPER].map(f32::from_bits)
}

/// The nearest bf16, ties to even.
#[inline(always)]
pub fn narrow_bf16(value: f32) -> u16 {
    (nearest::<false>(value) >> 16) as u16
}

/// The nearest bf16 of two values, in the lower and in the upper half of a word. With `NUMBERS`
/// neither value is NaN.
#[inline(always)]
pub fn narrow_bf16_pair<const NUMBERS: bool>([low, high]: [f32; 2]) -> u32 {
    nearest::<NUMBERS>(low) >> 16 | nearest::<NUMBERS>(high) & UPPER
}

/// One of the two neighbouring bf16, the upper in magnitude with the probability that makes the
/// expected value exact. The lower 16 bits of `random_bits` count; a value that is a bf16 stays the
/// same.
#[inline(always)]
pub fn narrow_bf16_at_random(value: f32, random_bits: u32) -> u16 {
    (at_random(value, random_bits) >> 16) as u16
}

/// Two of [`narrow_bf16_at_random`], in the lower and in the upper half of a word.
#[inline(always)]
pub fn narrow_bf16_pair_at_random([low, high]: [f32; 2], random_bits: [u32; 2]) -> u32 {
    at_random(low, random_bits[0]) >> 16 | at_random(high, random_bits[1]) & UPPER
}

/// The nearest bf16 in the upper half.
#[inline(always)]
fn nearest<const NUMBER: bool>(value: f32) -> u32 {
    let odd = value.to_bits() >> 16 & 1;
    rounded::<NUMBER>(value, 0x7fff + odd)
}

/// The bf16 that `random_bits` choose, in the upper half.
#[inline(always)]
fn at_random(value: f32, random_bits: u32) -> u32 {
    rounded::<false>(value, random_bits & 0xffff)
}

/// The bits of `value` plus `addend`, which is below 2¹⁶. The upper half counts; NaN stay NaN.
#[inline(always)]
fn rounded<const NUMBER: bool>(value: f32, addend: u32) -> u32 {
    let bits = value.to_bits();
    let sum = bits.wrapping_add(addend);
    // Comparing floats is one instruction, comparing their bits two.
    if !NUMBER && value.is_nan() { bits | QUIET } else { sum }
}

/// An f32 as the nearest bf16, ties away from zero, and the signed difference of the bits: nothing
/// is lost.
///
/// ```text
/// param = (bits + 2¹⁵) >> 16        remainder = bits − (param << 16), in −2¹⁵ … 2¹⁵ − 1
/// ```
/// Every NaN becomes one and the same first: a payload of ones would carry into the sign. Finite
/// values beyond the largest bf16 have an infinity for a parameter and come back finite.
#[inline(always)]
pub fn split_bf16(value: f32) -> (u16, u16) {
    let bits = value.to_bits();
    let bits = if bits & MAGNITUDE > INFINITY { INFINITY | QUIET } else { bits };
    (((bits.wrapping_add(0x8000)) >> 16) as u16, bits as u16)
}

/// The f32 that [`split_bf16`] split into these two.
#[inline(always)]
pub fn join_bf16(param: u16, remainder: u16) -> f32 {
    let remainder = i32::from(remainder as i16) as u32;
    f32::from_bits((u32::from(param) << 16).wrapping_add(remainder))
}

/// An f32 to 24 bits, as the nearest bf16 and a signed byte of bits below it, ties away from zero.
///
/// ```text
/// bits24 = (bits + 2⁷) >> 8
/// param = (bits24 + 2⁷) >> 8        remainder = bits24 − (param << 8), in −2⁷ … 2⁷ − 1
/// ```
/// Every NaN becomes one and the same first, as in [`split_bf16`].
#[inline(always)]
pub fn split_bf16_24(value: f32) -> (u16, i8) {
    let bits = if value.is_nan() { INFINITY | QUIET } else { value.to_bits() };
    let rounded = bits.wrapping_add(0x80);
    ((rounded.wrapping_add(0x8000) >> 16) as u16, (rounded >> 8) as i8)
}

/// The f32 of 24 bits that [`split_bf16_24`] split into these two.
#[inline(always)]
pub fn join_bf16_24(param: u16, remainder: i8) -> f32 {
    let remainder = (i32::from(remainder) << 8) as u32;
    f32::from_bits((u32::from(param) << 16).wrapping_add(remainder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Every `step`-th pattern of 32 bits, with all neighbours of the boundaries of rounding.
    fn patterns(step: u32) -> impl Iterator<Item = u32> {
        let edges = (0..=u32::from(u16::MAX)).flat_map(|high| {
            let around = [0u32, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
            around.map(|low| high << 16 | low)
        });
        (0..u32::MAX / step).map(move |i| i * step).chain(edges)
    }

    fn check_narrowing(patterns: impl Iterator<Item = u32>) {
        for bits in patterns {
            let value = f32::from_bits(bits);
            assert_eq!(narrow_f16(value), f16::from_f32_const(value).to_bits(), "{bits:08x}");
            assert_eq!(narrow_bf16(value), bf16::from_f32_const(value).to_bits(), "{bits:08x}");
        }
    }

    /// Patterns that are no NaN come back as their upper 24 bits, rounded; those come back whole.
    fn check_splitting_24(patterns: impl Iterator<Item = u32>) {
        for bits in patterns {
            let value = f32::from_bits(bits);
            let (param, remainder) = split_bf16_24(value);
            let found = join_bf16_24(param, remainder);
            if value.is_nan() {
                assert_eq!((param, remainder), (0x7fc0, 0), "{bits:08x}");
                continue;
            }
            assert_eq!(found.to_bits(), ((u64::from(bits) + 128) & !0xff) as u32, "{bits:08x}");
            assert_eq!(split_bf16_24(found), (param, remainder), "{bits:08x}");
            // No bf16 is nearer; differences of bits order as values do.
            let distance = i64::from(u32::from(param) << 16) - i64::from(found.to_bits());
            assert!(distance.abs() <= 0x8000, "{bits:08x}");
        }
    }

    fn check_splitting(patterns: impl Iterator<Item = u32>) {
        for bits in patterns {
            let value = f32::from_bits(bits);
            let (param, remainder) = split_bf16(value);
            let found = join_bf16(param, remainder);
            if value.is_nan() {
                assert!(found.is_nan() && widen_bf16(param).is_nan(), "{bits:08x}");
                continue;
            }
            assert_eq!(found.to_bits(), bits, "{bits:08x}");
            // No bf16 is nearer; differences of bits order as values do.
            let distance = (i64::from(bits) - (i64::from(param) << 16)).abs();
            assert!(distance <= 0x8000, "{bits:08x}");
        }
    }

    #[test]
    fn widening_is_that_of_half_for_every_pattern() {
        for bits in 0..=u16::MAX {
            for (found, expected) in [
                (widen_f16(bits), f16::from_bits(bits).to_f32_const()),
                (widen_bf16(bits), bf16::from_bits(bits).to_f32_const()),
            ] {
                let same = found.to_bits() == expected.to_bits();
                assert!(same || (found.is_nan() && expected.is_nan()), "{bits:04x}");
            }
        }
    }

    #[test]
    fn narrowing_is_that_of_half() {
        check_narrowing(patterns(257));
    }

    #[test]
    #[ignore = "all 2^32 patterns take half a minute"]
    fn narrowing_is_that_of_half_for_every_pattern() {
        check_narrowing(0..=u32::MAX);
    }

    #[test]
    fn a_remainder_loses_nothing() {
        check_splitting(patterns(251));
        check_splitting_24(patterns(251));
    }

    #[test]
    #[ignore = "all 2^32 patterns take half a minute"]
    fn a_remainder_loses_nothing_of_any_pattern() {
        check_splitting(0..=u32::MAX);
        check_splitting_24(0..=u32::MAX);
    }

    #[test]
    fn rounding_at_random_takes_neighbours_with_the_probability_of_their_nearness() {
        for bits in [0x3f80_4000u32, 0x3f80_0001, 0xbf80_c000, 0x0000_8000, 0x7f7f_ffff] {
            let up = (0..=0xffff).filter(|&random_bits| {
                let found = narrow_bf16_at_random(f32::from_bits(bits), random_bits);
                assert!(found == (bits >> 16) as u16 || found == (bits >> 16) as u16 + 1);
                found != (bits >> 16) as u16
            });
            assert_eq!(up.count() as u32, bits & 0xffff, "{bits:08x}");
        }
        for bits in [0u32, SIGN, 0x3f80_0000, INFINITY, 0xff80_0000] {
            let found = narrow_bf16_at_random(f32::from_bits(bits), 0xffff);
            assert_eq!(found, (bits >> 16) as u16, "{bits:08x}");
        }
        let nan = narrow_bf16_at_random(f32::from_bits(0x7fff_ffff), 0xffff);
        assert!(widen_bf16(nan).is_nan());
    }
}
