//! The codec of AVX2. Compilers find neither the conversions of halves nor the packing of bytes in
//! loops; with both, a step of AdamW whose moments are coded takes a quarter less.

use std::arch::x86_64::*;

use crate::codec::{CODED_GROUP, Codec, PortableCodec, codec_of_module};
use crate::features::Avx2;

/// The codec of processors with AVX2, FMA and conversions of halves; holding one proves that this
/// processor has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2Codec(());

impl Avx2Codec {
    #[inline(always)]
    pub(crate) fn new(_proof: Avx2) -> Self {
        Self(())
    }
}

codec_of_module!(Avx2Codec);

/// The eight values from `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32; CODED_GROUP], at: usize) -> __m256 {
    let eight = &values[at..at + 8];
    // SAFETY: a slice of eight f32, whose bytes need no alignment for this load.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(values: __m256, to: &mut [f32]) {
    let eight = &mut to[..8];
    // SAFETY: a slice of eight f32, whose bytes need no alignment for this store.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_signed(codes: &[u8; CODED_GROUP], values: &mut [f32; CODED_GROUP]) {
    for at in [0, 16] {
        let sixteen = &codes[at..at + 16];
        // SAFETY: a slice of 16 bytes, which need no alignment for this load.
        let bytes = unsafe { _mm_loadu_si128(sixteen.as_ptr().cast()) };
        // S.EE.MMMMM becomes the half S.000EE.MMMMM00000.
        let words = _mm256_slli_epi16::<5>(_mm256_cvtepi8_epi16(bytes));
        let halves = _mm256_and_si256(words, _mm256_set1_epi16(0x8fe0_u16 as i16));
        store(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), &mut values[at..]);
        store(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), &mut values[at + 8..]);
    }
}

/// Integers from −128 to 127 in two's complement, or from 0 to 255, whose packing in halves of
/// registers is put in order.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(packed: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

#[inline]
#[target_feature(enable = "avx2")]
fn put(packed: __m256i, codes: &mut [u8; CODED_GROUP]) {
    // SAFETY: an array of 32 bytes, which need no alignment for this store.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) }
}

/// Codes of eight values as signed integers; that of a NaN is the smallest.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn signed(values: __m256, factor: __m256) -> __m256i {
    let t = _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), values), factor);
    // Halves and quarters are exact, so a fused addition rounds as two operations do.
    let half = _mm256_fmadd_ps(t, _mm256_set1_ps(0.5), _mm256_set1_ps(32.0));
    let quarter = _mm256_fmadd_ps(t, _mm256_set1_ps(0.25), _mm256_set1_ps(64.0));
    let magnitude = _mm256_cvtps_epi32(_mm256_min_ps(t, _mm256_min_ps(half, quarter)));
    _mm256_sign_epi32(magnitude, _mm256_castps_si256(values))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn encode_signed(values: &[f32; CODED_GROUP], factor: f32, codes: &mut [u8; CODED_GROUP]) {
    let factor = _mm256_set1_ps(factor);
    let [a, b] = [signed(load(values, 0), factor), signed(load(values, 8), factor)];
    let [c, d] = [signed(load(values, 16), factor), signed(load(values, 24), factor)];
    // Saturation makes the code of a NaN −128.
    let words = [_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)];
    let bytes = in_order(_mm256_packs_epi16(words[0], words[1]));
    let sign = _mm256_and_si256(bytes, _mm256_set1_epi8(-128));
    put(_mm256_or_si256(_mm256_abs_epi8(bytes), sign), codes);
}

#[inline]
#[target_feature(enable = "avx2")]
fn positive(values: __m256, factor: __m256, dither: __m256) -> __m256i {
    let x = _mm256_add_ps(_mm256_mul_ps(values, factor), dither);
    // The second operand where one is NaN: 1.
    let held = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(1.0)), _mm256_set1_ps(255.0));
    _mm256_cvtps_epi32(held)
}

#[inline]
#[target_feature(enable = "avx2")]
fn encode_positive(
    values: &[f32; CODED_GROUP],
    factor: f32,
    dither: &[f32; CODED_GROUP],
    codes: &mut [u8; CODED_GROUP],
) {
    let factor = _mm256_set1_ps(factor);
    let [a, b] = [
        positive(load(values, 0), factor, load(dither, 0)),
        positive(load(values, 8), factor, load(dither, 8)),
    ];
    let [c, d] = [
        positive(load(values, 16), factor, load(dither, 16)),
        positive(load(values, 24), factor, load(dither, 24)),
    ];
    let words = [_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)];
    put(in_order(_mm256_packus_epi16(words[0], words[1])), codes);
}

/// Largest magnitudes of each place of eight, as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn most(values: &[f32; CODED_GROUP]) -> __m256i {
    let [a, b] = [magnitudes(values, 0), magnitudes(values, 8)];
    let [c, d] = [magnitudes(values, 16), magnitudes(values, 24)];
    _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d))
}

#[inline]
#[target_feature(enable = "avx2")]
fn magnitudes(values: &[f32; CODED_GROUP], at: usize) -> __m256i {
    _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), load(values, at)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest(lists: [&[f32; CODED_GROUP]; 2]) -> [f32; 2] {
    let (a, b) = (most(lists[0]), most(lists[1]));
    // Places of both lists take turns, so that one tree serves both.
    let pairs = _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let halves = _mm_max_epu32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let both = _mm_castsi128_ps(_mm_max_epu32(halves, _mm_unpackhi_epi64(halves, halves)));
    [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
}

/// The upper halves of 16 values in order.
#[inline]
#[target_feature(enable = "avx2")]
fn put_halves(values: [__m256i; 2], halves: &mut [u16]) {
    let [low, high] = [_mm256_srli_epi32::<16>(values[0]), _mm256_srli_epi32::<16>(values[1])];
    let words = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(low, high));
    let sixteen = &mut halves[..16];
    // SAFETY: a slice of 16 words, which need no alignment for this store.
    unsafe { _mm256_storeu_si256(sixteen.as_mut_ptr().cast(), words) }
}

/// Eight values rounded to bf16, in the upper halves.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded(values: __m256) -> __m256i {
    let bits = _mm256_castps_si256(values);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
    _mm256_blendv_epi8(sum, quiet, nan)
}

#[inline]
#[target_feature(enable = "avx2")]
fn narrow_bf16(values: &[f32; CODED_GROUP], narrow: &mut [u16; CODED_GROUP]) {
    for at in [0, 16] {
        let both = [rounded(load(values, at)), rounded(load(values, at + 8))];
        put_halves(both, &mut narrow[at..]);
    }
}

/// Eight values rounded to 24 bits, in the upper three bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded_24(values: __m256) -> __m256i {
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(values, values);
    let one_nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
    let bits = _mm256_castps_si256(_mm256_blendv_ps(values, one_nan, nan));
    _mm256_add_epi32(bits, _mm256_set1_epi32(0x80))
}

/// The third bytes of 16 values as words, of which every two neighbours are four places apart.
#[inline]
#[target_feature(enable = "avx2")]
fn third_bytes(values: [__m256i; 2]) -> __m256i {
    let high = _mm256_slli_epi32::<16>(values[1]);
    _mm256_srli_epi16::<8>(_mm256_blend_epi16::<0xaa>(values[0], high))
}

#[inline]
#[target_feature(enable = "avx2")]
fn join_bf16_24(
    params: &[u16; CODED_GROUP],
    remainders: &[i8; CODED_GROUP],
    values: &mut [f32; CODED_GROUP],
) {
    // Compilers find these conversions, all to the wider type.
    PortableCodec.join_bf16_24(params, remainders, values);
}

#[inline]
#[target_feature(enable = "avx2")]
fn split_bf16_24(
    values: &[f32; CODED_GROUP],
    params: &mut [u16; CODED_GROUP],
    remainders: &mut [i8; CODED_GROUP],
) {
    let half = _mm256_set1_epi32(0x8000);
    let [a, b] = [rounded_24(load(values, 0)), rounded_24(load(values, 8))];
    let [c, d] = [rounded_24(load(values, 16)), rounded_24(load(values, 24))];
    put_halves([_mm256_add_epi32(a, half), _mm256_add_epi32(b, half)], params);
    put_halves([_mm256_add_epi32(c, half), _mm256_add_epi32(d, half)], &mut params[16..]);
    let bytes = _mm256_packus_epi16(third_bytes([a, b]), third_bytes([c, d]));
    // Places 0 8 1 9 2 10 3 11 of each half, then of the other.
    let order = _mm256_setr_epi8(
        0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12,
        14, 9, 11, 13, 15,
    );
    let bytes = in_order(_mm256_shuffle_epi8(bytes, order));
    // SAFETY: an array of 32 bytes, which need no alignment for this store.
    unsafe { _mm256_storeu_si256(remainders.as_mut_ptr().cast(), bytes) }
}
