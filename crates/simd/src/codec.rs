//! Codes of 8 bits for lists of f32, in groups of 32 with a unit each, as operations without a
//! branch.
//!
//! A *signed* code is a float S.EE.MMMMM. Its magnitude c stands for the integer
//! D(c) = max(c, 2c − 64, 4c − 256), 0 to 252. A *positive* code stands for itself, 1 to 255; an
//! encoded value never gets 0.
//!
//! ```text
//! signed      value = ±D·2⁻¹⁹·unit      unit = M·(2¹⁹ / 252)      k = min(252 / M, largest f32)
//!             t = |value|·k             c = round(min(t, t/2 + 32, t/4 + 64))
//! positive    value = code·unit         unit = M·(1 / 255)        k = min(255 / M, largest f32)
//!             code = round(hold(value·k + dither, 1, 255))
//! ```
//! M is the group's largest magnitude, compared as an integer, so that a NaN is largest; of a NaN,
//! k is 0. Every operation is rounded once and none is fused. A value that is not finite
//! makes its group's unit not finite, and the group decodes to NaN and infinities.

use crate::narrow::{join_bf16_24, narrow_bf16, split_bf16_24};

/// Elements with one unit.
pub const CODED_GROUP: usize = 32;

/// Elements that a codec takes at a time: two groups, whose codes fill a vector of AVX-512.
pub const CODED_PAIR: usize = 2 * CODED_GROUP;

/// 2²³, the first f32 whose last place is 1: adding it rounds to an integer, ties to even.
const INTEGERS: f32 = 8_388_608.0;

/// The value of a signed code in units, ±D·2⁻¹⁹.
#[inline(always)]
pub fn decode_signed(code: u8) -> f32 {
    // As an f32 of exponent EE − 15. Where EE is 0, the code has no hidden bit: twice the mantissa
    // without it. Elsewhere that is the larger of the two.
    let normal = f32::from_bits((u32::from(code & 0x7f) << 18) + (112 << 23));
    let subnormal = (normal + normal) - f32::from_bits(113 << 23);
    let magnitude = if subnormal < normal { subnormal } else { normal };
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

/// The value of a positive code in units.
#[inline(always)]
pub fn decode_positive(code: u8) -> f32 {
    f32::from(code)
}

/// k: what values of a group are multiplied with before they are rounded. `codes` is 252 or 255.
#[inline(always)]
pub fn factor_of(codes: f32, largest: f32) -> f32 {
    let factor = codes / largest;
    let held = if factor < f32::MAX { factor } else { f32::MAX };
    if factor.is_nan() { 0.0 } else { held }
}

/// The signed code of a value in a group with this factor, of which it is not beyond the largest.
/// Zero has no sign; a NaN has 128.
#[inline(always)]
pub fn encode_signed(value: f32, factor: f32) -> u8 {
    let t = value.abs() * factor;
    let (half, quarter) = (t * 0.5 + 32.0, t * 0.25 + 64.0);
    let least = if half < quarter { half } else { quarter };
    let least = if t < least { t } else { least };
    let magnitude = (least + INTEGERS).to_bits() & 0x7f;
    // Bit 7 of magnitude + 127 is there for all magnitudes but 0.
    let sign = value.to_bits() >> 24 & (magnitude + 0x7f) & 0x80;
    (if t.is_nan() { 0x80 } else { magnitude | sign }) as u8
}

/// The positive code of a value whose group has this factor.
#[inline(always)]
pub fn encode_positive(value: f32, factor: f32, dither: f32) -> u8 {
    let x = value * factor + dither;
    let x = if x > 1.0 { x } else { 1.0 };
    let x = if x < 255.0 { x } else { 255.0 };
    (x + INTEGERS).to_bits() as u8
}

/// Work on coded groups that is compiled for each level: [`crate::Level::run_coded`].
pub trait CodedWork {
    /// The result of the work.
    type Output;
    /// Does the work by a codec; to be inlined.
    fn run<C: Codec>(self, codec: C) -> Self::Output;
}

/// Codes, and 16-bit parameters, of two groups at a time. Every codec gives the same bits, but for
/// payloads of NaN.
pub trait Codec: Copy {
    /// [`crate::narrow_bf16`] of each value.
    fn narrow_bf16(self, values: &[f32; CODED_PAIR], narrow: &mut [u16; CODED_PAIR]);

    /// [`join_bf16_24`] of each parameter.
    fn join_bf16_24(
        self,
        params: &[u16; CODED_PAIR],
        remainders: &[i8; CODED_PAIR],
        values: &mut [f32; CODED_PAIR],
    );

    /// [`split_bf16_24`] of each value.
    fn split_bf16_24(
        self,
        values: &[f32; CODED_PAIR],
        params: &mut [u16; CODED_PAIR],
        remainders: &mut [i8; CODED_PAIR],
    );

    /// [`decode_signed`] of each code.
    fn decode_signed(self, codes: &[u8; CODED_PAIR], values: &mut [f32; CODED_PAIR]);

    /// [`encode_signed`] of each value, with the factor of its group.
    fn encode_signed(
        self,
        values: &[f32; CODED_PAIR],
        factors: &[f32; 2],
        codes: &mut [u8; CODED_PAIR],
    );

    /// [`encode_positive`] of each value, with the factor of its group, of which no value is beyond
    /// the largest.
    fn encode_positive(
        self,
        values: &[f32; CODED_PAIR],
        factors: &[f32; 2],
        dither: &[f32; CODED_GROUP],
        codes: &mut [u8; CODED_PAIR],
    );

    /// The largest magnitude of both groups of the first list, then of the second, compared as an
    /// integer: a NaN is larger than numbers.
    fn largest(self, lists: [&[f32; CODED_PAIR]; 2]) -> [f32; 4];

    /// [`factor_of`] four groups, in one division where compilers make several.
    fn factors_of(self, codes: [f32; 4], largest: [f32; 4]) -> [f32; 4];
}

/// Implements [`Codec`] by functions of the same names in the module, which are compiled for the
/// features that a value of the type proves.
#[cfg(target_arch = "x86_64")]
macro_rules! codec_of_module {
    ($codec:ident) => {
        impl Codec for $codec {
            codec_of_module! {
                narrow_bf16(values: &[f32; CODED_PAIR], narrow: &mut [u16; CODED_PAIR]);
                join_bf16_24(
                    params: &[u16; CODED_PAIR],
                    remainders: &[i8; CODED_PAIR],
                    values: &mut [f32; CODED_PAIR],
                );
                split_bf16_24(
                    values: &[f32; CODED_PAIR],
                    params: &mut [u16; CODED_PAIR],
                    remainders: &mut [i8; CODED_PAIR],
                );
                decode_signed(codes: &[u8; CODED_PAIR], values: &mut [f32; CODED_PAIR]);
                encode_signed(
                    values: &[f32; CODED_PAIR],
                    factors: &[f32; 2],
                    codes: &mut [u8; CODED_PAIR],
                );
                encode_positive(
                    values: &[f32; CODED_PAIR],
                    factors: &[f32; 2],
                    dither: &[f32; CODED_GROUP],
                    codes: &mut [u8; CODED_PAIR],
                );
                largest(lists: [&[f32; CODED_PAIR]; 2]) -> [f32; 4];
                factors_of(codes: [f32; 4], largest: [f32; 4]) -> [f32; 4];
            }
        }
    };
    ($($name:ident($($value:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {$(
        #[inline(always)]
        fn $name(self, $($value: $type),*) $(-> $result)? {
            // SAFETY: only `new` makes a value of this type, from a proof of the features.
            unsafe { $name($($value),*) }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
pub(crate) use codec_of_module;

/// The codec of loops that compilers turn into vectors of any level.
#[derive(Clone, Copy, Debug)]
pub struct PortableCodec;

impl Codec for PortableCodec {
    #[inline(always)]
    fn narrow_bf16(self, values: &[f32; CODED_PAIR], narrow: &mut [u16; CODED_PAIR]) {
        for (narrow, &value) in narrow.iter_mut().zip(values) {
            *narrow = narrow_bf16(value);
        }
    }

    #[inline(always)]
    fn join_bf16_24(
        self,
        params: &[u16; CODED_PAIR],
        remainders: &[i8; CODED_PAIR],
        values: &mut [f32; CODED_PAIR],
    ) {
        for lane in 0..CODED_PAIR {
            values[lane] = join_bf16_24(params[lane], remainders[lane]);
        }
    }

    #[inline(always)]
    fn split_bf16_24(
        self,
        values: &[f32; CODED_PAIR],
        params: &mut [u16; CODED_PAIR],
        remainders: &mut [i8; CODED_PAIR],
    ) {
        // One loop for each width: loops over two become vectors of half the width.
        for (param, &value) in params.iter_mut().zip(values) {
            *param = split_bf16_24(value).0;
        }
        for (remainder, &value) in remainders.iter_mut().zip(values) {
            *remainder = split_bf16_24(value).1;
        }
    }

    #[inline(always)]
    fn decode_signed(self, codes: &[u8; CODED_PAIR], values: &mut [f32; CODED_PAIR]) {
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = decode_signed(code);
        }
    }

    #[inline(always)]
    fn encode_signed(
        self,
        values: &[f32; CODED_PAIR],
        factors: &[f32; 2],
        codes: &mut [u8; CODED_PAIR],
    ) {
        for (group, &factor) in factors.iter().enumerate() {
            for at in group * CODED_GROUP..(group + 1) * CODED_GROUP {
                codes[at] = encode_signed(values[at], factor);
            }
        }
    }

    #[inline(always)]
    fn encode_positive(
        self,
        values: &[f32; CODED_PAIR],
        factors: &[f32; 2],
        dither: &[f32; CODED_GROUP],
        codes: &mut [u8; CODED_PAIR],
    ) {
        for (group, &factor) in factors.iter().enumerate() {
            let first = group * CODED_GROUP;
            for (lane, &dither) in dither.iter().enumerate() {
                codes[first + lane] = encode_positive(values[first + lane], factor, dither);
            }
        }
    }

    #[inline(always)]
    fn largest(self, lists: [&[f32; CODED_PAIR]; 2]) -> [f32; 4] {
        std::array::from_fn(|at| largest(&lists[at / 2].as_chunks().0[at % 2]))
    }

    #[inline(always)]
    fn factors_of(self, codes: [f32; 4], largest: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|at| factor_of(codes[at], largest[at]))
    }
}

#[inline(always)]
fn largest(values: &[f32; CODED_GROUP]) -> f32 {
    // Halves against each other: loops of a length that compilers see are vectors.
    let mut most: [u32; 16] = std::array::from_fn(|lane| {
        values[lane].abs().to_bits().max(values[lane + 16].abs().to_bits())
    });
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            most[lane] = most[lane].max(most[lane + half]);
        }
    }
    f32::from_bits(most[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn a_signed_code_is_a_float_of_8_bits() {
        for code in 0..=u8::MAX {
            let c = i32::from(code & 0x7f);
            let d = c.max(2 * c - 64).max(4 * c - 256);
            let expected = if code > 127 { -(d as f32) } else { d as f32 } / 524_288.0;
            let found = decode_signed(code);
            assert_eq!(found.to_bits(), expected.to_bits(), "{code}");
            // As a half, too, which is how processors read it.
            let bits = u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 5;
            assert_eq!(found, half::f16::from_bits(bits).to_f32());
            let again = encode_signed(found * 524_288.0, 1.0);
            assert_eq!(again, if code == 0x80 { 0 } else { code });
        }
    }

    #[test]
    fn a_value_gets_the_nearest_code() {
        let values: Vec<f32> = (0..128).map(|code| decode_signed(code) * 524_288.0).collect();
        for sixteenth in 0..=252 * 16 {
            let value = sixteenth as f32 / 16.0;
            let code = encode_signed(value, 1.0);
            let distance = (values[usize::from(code)] - value).abs();
            assert!(
                values.iter().all(|other| (other - value).abs() >= distance),
                "{value}: {code}"
            );
            assert_eq!(encode_signed(-value, 1.0), if code == 0 { 0 } else { code | 0x80 });
        }
    }

    #[test]
    fn a_positive_code_is_never_0() {
        assert_eq!(encode_positive(0.0, 1.0, -0.5), 1);
        assert_eq!(encode_positive(f32::NAN, 1.0, 0.0), 1);
        assert_eq!(encode_positive(254.6, 1.0, 0.49), 255);
        assert_eq!(encode_positive(f32::INFINITY, 1.0, 0.0), 255);
        // Ties go to even.
        assert_eq!([1.5, 2.5, 3.5].map(|value| encode_positive(value, 1.0, 0.0)), [2, 2, 4]);
    }

    #[test]
    fn factors_are_finite_and_of_nan_0() {
        assert_eq!(factor_of(252.0, 0.0), f32::MAX);
        assert_eq!(factor_of(252.0, f32::from_bits(1)), f32::MAX);
        assert_eq!(factor_of(252.0, f32::INFINITY), 0.0);
        assert_eq!(factor_of(252.0, f32::NAN), 0.0);
        assert_eq!(factor_of(255.0, 2.0), 127.5);
    }

    /// Two groups through all operations of a codec.
    struct Everything<'a> {
        values: &'a [f32; CODED_PAIR],
        codes: &'a [u8; CODED_PAIR],
        /// Factors of signed codes, and of positive ones.
        factors: [[f32; 2]; 2],
        dither: &'a [f32; CODED_GROUP],
    }

    /// Bits of every result; those of NaN are the same.
    #[derive(Debug, PartialEq)]
    struct Results {
        decoded: Vec<u32>,
        narrow: Vec<u16>,
        params: Vec<u16>,
        remainders: Vec<i8>,
        joined: Vec<u32>,
        signed: Vec<u8>,
        positive: Vec<u8>,
        largest: [u32; 4],
        factors: [u32; 4],
    }

    fn bits(value: f32) -> u32 {
        if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
    }

    impl CodedWork for Everything<'_> {
        type Output = Results;

        fn run<C: Codec>(self, codec: C) -> Results {
            let mut decoded = [0.0; CODED_PAIR];
            codec.decode_signed(self.codes, &mut decoded);
            let (mut signed, mut positive) = ([0; CODED_PAIR], [0; CODED_PAIR]);
            let [of_signed, of_positive] = &self.factors;
            codec.encode_signed(self.values, of_signed, &mut signed);
            codec.encode_positive(self.values, of_positive, self.dither, &mut positive);
            let largest = codec.largest([self.values, &decoded]);
            let (mut narrow, mut params) = ([0; CODED_PAIR], [0; CODED_PAIR]);
            let (mut remainders, mut joined) = ([0; CODED_PAIR], [0.0; CODED_PAIR]);
            codec.narrow_bf16(self.values, &mut narrow);
            codec.split_bf16_24(self.values, &mut params, &mut remainders);
            codec.join_bf16_24(&params, &self.codes.map(|code| code as i8), &mut joined);
            Results {
                decoded: decoded.map(bits).to_vec(),
                narrow: narrow.to_vec(),
                params: params.to_vec(),
                remainders: remainders.to_vec(),
                joined: joined.map(bits).to_vec(),
                signed: signed.to_vec(),
                positive: positive.to_vec(),
                largest: largest.map(bits),
                factors: codec.factors_of([252.0, 255.0, 252.0, 255.0], largest).map(bits),
            }
        }
    }

    /// The largest magnitude of each group, compared as an integer.
    fn most(values: &[f32; CODED_PAIR]) -> [f32; 2] {
        let most = |values: &[f32]| values.iter().map(|value| value.abs().to_bits()).max();
        let (first, second) = values.split_at(CODED_GROUP);
        [first, second].map(|group| f32::from_bits(most(group).unwrap()))
    }

    /// The operations by their definitions, an element at a time.
    fn defined(work: &Everything<'_>) -> Results {
        let Everything { values, codes, factors, dither } = *work;
        let decoded = codes.map(decode_signed);
        let factors = |at: usize| factors.map(|factors| factors[at / CODED_GROUP]);
        let signed = (0..CODED_PAIR).map(|at| encode_signed(values[at], factors(at)[0]));
        let positive = (0..CODED_PAIR)
            .map(|at| encode_positive(values[at], factors(at)[1], dither[at % CODED_GROUP]));
        let largest: [f32; 4] = std::array::from_fn(|at| most([values, &decoded][at / 2])[at % 2]);
        let split = values.map(split_bf16_24);
        let joined =
            split.iter().zip(codes).map(|(split, code)| join_bf16_24(split.0, *code as i8));
        Results {
            decoded: decoded.map(bits).to_vec(),
            narrow: values.map(narrow_bf16).to_vec(),
            params: split.map(|split| split.0).to_vec(),
            remainders: split.map(|split| split.1).to_vec(),
            joined: joined.map(bits).collect(),
            signed: signed.collect(),
            positive: positive.collect(),
            largest: largest.map(bits),
            factors: std::array::from_fn(|at| bits(factor_of([252.0, 255.0][at % 2], largest[at]))),
        }
    }

    #[test]
    fn every_level_gives_the_codes_of_the_definition() {
        let mut seed = 1u64;
        let mut draw = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 32) as u32
        };
        for round in 0..20_000 {
            let values: [f32; CODED_PAIR] = std::array::from_fn(|_| match round % 5 {
                // Any bits; small integers and halves; subnormals; a few NaN; the usual.
                0 => f32::from_bits(draw()),
                1 => (draw() % 1100) as f32 / 2.0 - 270.0,
                2 => f32::from_bits(draw() & 0x807f_ffff),
                3 if draw() % 64 == 0 => f32::from_bits(draw() | 0x7fc0_0000),
                _ => (draw() >> 8) as f32 / 16_777_216.0 - 0.5,
            });
            let codes = std::array::from_fn(|_| draw() as u8);
            let dither = std::array::from_fn(|_| (draw() >> 8) as f32 / 16_777_216.0 - 0.5);
            // Those of the groups, or less; NaN is largest.
            let share = [1.0, 0.7, 1e-3][round % 3];
            let factors = [252.0, 255.0]
                .map(|codes| most(&values).map(|most| factor_of(codes, most) * share));
            let work = || Everything { values: &values, codes: &codes, factors, dither: &dither };
            let expected = defined(&work());
            for level in Level::available() {
                assert_eq!(level.run_coded(work()), expected, "{level}, round {round}, {values:?}");
            }
        }
    }
}
