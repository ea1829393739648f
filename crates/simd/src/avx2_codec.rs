//! The codec of AVX2. Compilers find neither the conversions of halves nor the packing of bytes in
//! loops; with both, a step of AdamW whose moments are coded takes a quarter less.

use std::arch::x86_64::*;

use crate::codec::{CODED_GROUP, CODED_PAIR, Codec, PortableCodec, codec_of_module};
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

/// Values in a vector.
const WIDTH: usize = 8;

/// Vectors of a group.
const VECTORS: usize = CODED_GROUP / WIDTH;

/// Vector `at` of a list.
#[inline]
#[target_feature(enable = "avx2")]
fn load<const N: usize>(values: &[f32; N], at: usize) -> __m256 {
    let eight = &values[at * WIDTH..][..WIDTH];
    // SAFETY: a slice of eight f32, whose bytes need no alignment for this load.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

/// Writes vector `at` of a list.
#[inline]
#[target_feature(enable = "avx2")]
fn store(vector: __m256, values: &mut [f32; CODED_PAIR], at: usize) {
    let eight = &mut values[at * WIDTH..][..WIDTH];
    // SAFETY: a slice of eight f32, whose bytes need no alignment for this store.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), vector) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode_signed(codes: &[u8; CODED_PAIR], values: &mut [f32; CODED_PAIR]) {
    for half in 0..CODED_PAIR / 16 {
        let sixteen = &codes[half * 16..][..16];
        // SAFETY: a slice of 16 bytes, which need no alignment for this load.
        let bytes = unsafe { _mm_loadu_si128(sixteen.as_ptr().cast()) };
        // S.EE.MMMMM becomes the half S.000EE.MMMMM00000.
        let words = _mm256_slli_epi16::<5>(_mm256_cvtepi8_epi16(bytes));
        let halves = _mm256_and_si256(words, _mm256_set1_epi16(0x8fe0_u16 as i16));
        store(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), values, 2 * half);
        store(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), values, 2 * half + 1);
    }
}

/// Dwords whose order packing has changed in halves of a vector, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(packed: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// Writes the codes of a group.
#[inline]
#[target_feature(enable = "avx2")]
fn put(bytes: __m256i, codes: &mut [u8; CODED_PAIR], group: usize) {
    let to = &mut codes[group * CODED_GROUP..][..CODED_GROUP];
    // SAFETY: a slice of 32 bytes, which need no alignment for this store.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) }
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
fn encode_signed(values: &[f32; CODED_PAIR], factors: &[f32; 2], codes: &mut [u8; CODED_PAIR]) {
    for (group, &factor) in factors.iter().enumerate() {
        let factor = _mm256_set1_ps(factor);
        let mut integers = [_mm256_setzero_si256(); VECTORS];
        for (at, integers) in integers.iter_mut().enumerate() {
            *integers = signed(load(values, group * VECTORS + at), factor);
        }
        // Saturation makes the code of a NaN −128.
        let [a, b, c, d] = integers;
        let words = [_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)];
        let bytes = in_order(_mm256_packs_epi16(words[0], words[1]));
        let sign = _mm256_and_si256(bytes, _mm256_set1_epi8(-128));
        put(_mm256_or_si256(_mm256_abs_epi8(bytes), sign), codes, group);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn encode_positive(
    values: &[f32; CODED_PAIR],
    factors: &[f32; 2],
    dither: &[f32; CODED_GROUP],
    codes: &mut [u8; CODED_PAIR],
) {
    for (group, &factor) in factors.iter().enumerate() {
        let factor = _mm256_set1_ps(factor);
        let mut integers = [_mm256_setzero_si256(); VECTORS];
        for (at, integers) in integers.iter_mut().enumerate() {
            let scaled = _mm256_mul_ps(load(values, group * VECTORS + at), factor);
            *integers = _mm256_cvtps_epi32(_mm256_add_ps(scaled, load(dither, at)));
        }
        // Saturation holds codes up to 255, and makes that of a NaN 0.
        let [a, b, c, d] = integers;
        let words = [_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)];
        let bytes = in_order(_mm256_packus_epi16(words[0], words[1]));
        put(_mm256_max_epu8(bytes, _mm256_set1_epi8(1)), codes, group);
    }
}

/// Largest magnitudes of each place of eight of a group, as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of(values: &[f32; CODED_PAIR], group: usize) -> __m256i {
    let first = group * VECTORS;
    let [a, b] = [magnitudes(values, first), magnitudes(values, first + 1)];
    let [c, d] = [magnitudes(values, first + 2), magnitudes(values, first + 3)];
    _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d))
}

#[inline]
#[target_feature(enable = "avx2")]
fn magnitudes(values: &[f32; CODED_PAIR], at: usize) -> __m256i {
    _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), load(values, at)))
}

/// Largest magnitudes of each group of a list, in dwords that take turns.
#[inline]
#[target_feature(enable = "avx2")]
fn most(values: &[f32; CODED_PAIR]) -> __m256i {
    let (first, second) = (largest_of(values, 0), largest_of(values, 1));
    let low = _mm256_unpacklo_epi32(first, second);
    _mm256_max_epu32(low, _mm256_unpackhi_epi32(first, second))
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest(lists: [&[f32; CODED_PAIR]; 2]) -> [f32; 4] {
    // Places of all four groups take turns, so that one tree serves them all.
    let (a, b) = (most(lists[0]), most(lists[1]));
    let all = _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    largest_of_turns(all)
}

/// Largest of both halves, whose four groups take turns.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn largest_of_turns(all: __m256i) -> [f32; 4] {
    let [low, high] = [_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all)];
    let mut largest = [0.0; 4];
    // SAFETY: an array of four f32, whose bytes need no alignment for this store.
    unsafe {
        _mm_storeu_ps(largest.as_mut_ptr(), _mm_castsi128_ps(_mm_max_epu32(low, high)));
    }
    largest
}

/// [`Codec::factors_of`], of AVX-512's codec, too.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn factors_of(codes: [f32; 4], largest: [f32; 4]) -> [f32; 4] {
    let [a, b, c, d] = largest;
    let largest = _mm_setr_ps(a, b, c, d);
    let [a, b, c, d] = codes;
    let factors = _mm_div_ps(_mm_setr_ps(a, b, c, d), largest);
    // A NaN becomes 0.
    let numbers = _mm_and_ps(factors, _mm_cmpord_ps(factors, factors));
    let mut held = [0.0; 4];
    // SAFETY: an array of four f32, whose bytes need no alignment for this store.
    unsafe { _mm_storeu_ps(held.as_mut_ptr(), _mm_min_ps(numbers, _mm_set1_ps(f32::MAX))) }
    held
}

/// Writes the upper halves of values, vectors 2·`pair` and the next.
#[inline]
#[target_feature(enable = "avx2")]
fn put_halves(values: [__m256i; 2], halves: &mut [u16; CODED_PAIR], pair: usize) {
    let [low, high] = [_mm256_srli_epi32::<16>(values[0]), _mm256_srli_epi32::<16>(values[1])];
    let words = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(low, high));
    let sixteen = &mut halves[pair * 16..][..16];
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
fn narrow_bf16(values: &[f32; CODED_PAIR], narrow: &mut [u16; CODED_PAIR]) {
    for pair in 0..VECTORS {
        let both = [rounded(load(values, 2 * pair)), rounded(load(values, 2 * pair + 1))];
        put_halves(both, narrow, pair);
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

/// The third bytes of 16 values as words, of which every two neighbours are eight places apart.
#[inline]
#[target_feature(enable = "avx2")]
fn third_bytes(values: [__m256i; 2]) -> __m256i {
    let high = _mm256_slli_epi32::<16>(values[1]);
    _mm256_srli_epi16::<8>(_mm256_blend_epi16::<0xaa>(values[0], high))
}

#[inline]
#[target_feature(enable = "avx2")]
fn join_bf16_24(
    params: &[u16; CODED_PAIR],
    remainders: &[i8; CODED_PAIR],
    values: &mut [f32; CODED_PAIR],
) {
    // Compilers find these conversions, all to the wider type.
    PortableCodec.join_bf16_24(params, remainders, values);
}

#[inline]
#[target_feature(enable = "avx2")]
fn split_bf16_24(
    values: &[f32; CODED_PAIR],
    params: &mut [u16; CODED_PAIR],
    remainders: &mut [i8; CODED_PAIR],
) {
    let half = _mm256_set1_epi32(0x8000);
    for group in 0..2 {
        let mut words = [_mm256_setzero_si256(); 2];
        for (at, words) in words.iter_mut().enumerate() {
            let pair = group * 2 + at;
            let bits = [rounded_24(load(values, 2 * pair)), rounded_24(load(values, 2 * pair + 1))];
            let [a, b] = bits.map(|bits| _mm256_add_epi32(bits, half));
            put_halves([a, b], params, pair);
            *words = third_bytes(bits);
        }
        let bytes = _mm256_packus_epi16(words[0], words[1]);
        // Places 0 8 1 9 2 10 3 11 of each half, then of the other.
        let order = _mm256_setr_epi8(
            0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10,
            12, 14, 9, 11, 13, 15,
        );
        let bytes = in_order(_mm256_shuffle_epi8(bytes, order));
        let to = &mut remainders[group * CODED_GROUP..][..CODED_GROUP];
        // SAFETY: a slice of 32 bytes, which need no alignment for this store.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) }
    }
}
