//! The codec of AVX-512: 16 values at a time, and the bytes of two groups packed together.
//!
//! Compilers make three or four times as many instructions of the portable loops. Packing the bytes
//! of one group, or of 16 values by the conversions to bytes, takes half as many again: processors
//! that have one port for shuffles wait for it (`benches/coded.rs`).

use std::arch::x86_64::*;

use crate::avx2_codec::{factors_of, largest_of_turns};
use crate::codec::{CODED_GROUP, CODED_PAIR, Codec, codec_of_module};
use crate::features::Avx512;

/// The codec of processors with AVX-512 F, BW, DQ and VL; holding one proves that this processor
/// has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Codec(());

impl Avx512Codec {
    #[inline(always)]
    pub(crate) fn new(_proof: Avx512) -> Self {
        Self(())
    }
}

codec_of_module!(Avx512Codec);

/// Values in a vector.
const WIDTH: usize = 16;

/// Vectors of two groups.
const VECTORS: usize = CODED_PAIR / WIDTH;

/// Vector `at` of a list.
#[inline]
#[target_feature(enable = "avx512f")]
fn load<const N: usize>(values: &[f32; N], at: usize) -> __m512 {
    let sixteen = &values[at * WIDTH..][..WIDTH];
    // SAFETY: a slice of 16 f32, whose bytes need no alignment for this load.
    unsafe { _mm512_loadu_ps(sixteen.as_ptr()) }
}

/// Writes vector `at` of a list.
#[inline]
#[target_feature(enable = "avx512f")]
fn store(vector: __m512, values: &mut [f32; CODED_PAIR], at: usize) {
    let sixteen = &mut values[at * WIDTH..][..WIDTH];
    // SAFETY: a slice of 16 f32, whose bytes need no alignment for this store.
    unsafe { _mm512_storeu_ps(sixteen.as_mut_ptr(), vector) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_bytes(bytes: __m512i, to: &mut [u8; CODED_PAIR]) {
    // SAFETY: an array of 64 bytes, which need no alignment for this store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bytes) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_signed(codes: &[u8; CODED_PAIR], values: &mut [f32; CODED_PAIR]) {
    for half in 0..2 {
        let bytes = &codes[half * 32..][..32];
        // SAFETY: a slice of 32 bytes, which need no alignment for this load.
        let bytes = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        // S.EE.MMMMM becomes the half S.000EE.MMMMM00000.
        let words = _mm512_slli_epi16::<5>(_mm512_cvtepi8_epi16(bytes));
        let halves = _mm512_and_si512(words, _mm512_set1_epi16(0x8fe0_u16 as i16));
        let [low, high] = [_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves)];
        store(_mm512_cvtph_ps(low), values, 2 * half);
        store(_mm512_cvtph_ps(high), values, 2 * half + 1);
    }
}

/// Values without their signs.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitudes(values: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(i32::MAX))
}

/// Dwords whose order packing has changed in quarters of a vector, in order.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order(packed: __m512i) -> __m512i {
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, packed)
}

/// The signed code of each value, as integers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn signed(values: __m512, factor: __m512) -> __m512i {
    let t = _mm512_mul_ps(values, factor);
    let magnitude = _mm512_castsi512_ps(magnitudes(t));
    // Halves and quarters are exact, so a fused addition rounds as two operations do.
    let half = _mm512_fmadd_ps(magnitude, _mm512_set1_ps(0.5), _mm512_set1_ps(32.0));
    let quarter = _mm512_fmadd_ps(magnitude, _mm512_set1_ps(0.25), _mm512_set1_ps(64.0));
    // The lesser of the magnitudes, with the sign of t.
    let least = _mm512_range_ps::<0b0010>(t, _mm512_min_ps(half, quarter));
    _mm512_cvtps_epi32(least)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
fn encode_signed(values: &[f32; CODED_PAIR], factors: &[f32; 2], codes: &mut [u8; CODED_PAIR]) {
    let factors = factors.map(|factor| _mm512_set1_ps(factor));
    let mut codes_of = [_mm512_setzero_si512(); VECTORS];
    for (at, integers) in codes_of.iter_mut().enumerate() {
        *integers = signed(load(values, at), factors[at / 2]);
    }
    // Saturation makes the code of a NaN −128.
    let [a, b, c, d] = codes_of;
    let words = [_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)];
    let bytes = in_order(_mm512_packs_epi16(words[0], words[1]));
    let sign = _mm512_and_si512(bytes, _mm512_set1_epi8(-128));
    store_bytes(_mm512_or_si512(_mm512_abs_epi8(bytes), sign), codes);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn encode_positive(
    values: &[f32; CODED_PAIR],
    factors: &[f32; 2],
    dither: &[f32; CODED_GROUP],
    codes: &mut [u8; CODED_PAIR],
) {
    let factors = factors.map(|factor| _mm512_set1_ps(factor));
    let mut integers = [_mm512_setzero_si512(); VECTORS];
    for (at, integers) in integers.iter_mut().enumerate() {
        let scaled = _mm512_mul_ps(load(values, at), factors[at / 2]);
        *integers = _mm512_cvtps_epi32(_mm512_add_ps(scaled, load(dither, at % 2)));
    }
    // Saturation holds codes up to 255, and makes that of a NaN 0.
    let [a, b, c, d] = integers;
    let words = [_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d)];
    let bytes = in_order(_mm512_packus_epi16(words[0], words[1]));
    store_bytes(_mm512_max_epu8(bytes, _mm512_set1_epi8(1)), codes);
}

/// Largest magnitudes of each place of two vectors, as integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn larger(values: &[f32; CODED_PAIR], at: usize) -> __m512i {
    _mm512_max_epu32(magnitudes(load(values, at)), magnitudes(load(values, at + 1)))
}

/// Largest magnitudes of each group of a list, in dwords that take turns.
#[inline]
#[target_feature(enable = "avx512f")]
fn most(values: &[f32; CODED_PAIR]) -> __m512i {
    let (first, second) = (larger(values, 0), larger(values, 2));
    let low = _mm512_unpacklo_epi32(first, second);
    _mm512_max_epu32(low, _mm512_unpackhi_epi32(first, second))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn largest(lists: [&[f32; CODED_PAIR]; 2]) -> [f32; 4] {
    // Places of all four groups take turns, so that one tree serves them all.
    let (a, b) = (most(lists[0]), most(lists[1]));
    let all = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let [low, high] = [_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all)];
    largest_of_turns(_mm256_max_epu32(low, high))
}

/// Writes the upper halves of values, vectors 2·`half` and the next.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_upper(values: [__m512i; 2], halves: &mut [u16; CODED_PAIR], half: usize) {
    let [low, high] = values.map(|values| _mm512_srli_epi32::<16>(values));
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    let words = _mm512_permutexvar_epi64(order, _mm512_packus_epi32(low, high));
    let to = &mut halves[half * 32..][..32];
    // SAFETY: a slice of 32 words, which need no alignment for this store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) }
}

/// Values rounded to bf16, in the upper halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values), quiet)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn narrow_bf16(values: &[f32; CODED_PAIR], narrow: &mut [u16; CODED_PAIR]) {
    for half in 0..2 {
        let both = [rounded(load(values, 2 * half)), rounded(load(values, 2 * half + 1))];
        store_upper(both, narrow, half);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn join_bf16_24(
    params: &[u16; CODED_PAIR],
    remainders: &[i8; CODED_PAIR],
    values: &mut [f32; CODED_PAIR],
) {
    for at in 0..VECTORS {
        let (words, bytes) = (&params[at * WIDTH..][..WIDTH], &remainders[at * WIDTH..][..WIDTH]);
        // SAFETY: slices of 16 words and 16 bytes, which need no alignment for these loads.
        let (words, bytes) = unsafe {
            (_mm256_loadu_si256(words.as_ptr().cast()), _mm_loadu_si128(bytes.as_ptr().cast()))
        };
        let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words));
        let low = _mm512_slli_epi32::<8>(_mm512_cvtepi8_epi32(bytes));
        store(_mm512_castsi512_ps(_mm512_add_epi32(high, low)), values, at);
    }
}

/// Values rounded to 24 bits, in the upper three bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded_24(values: __m512) -> __m512i {
    // Classes of values, four bits each from the lowest: a NaN becomes the first operand, as 0
    // says, and any other value stays.
    let classes = _mm512_set1_epi32(0x1111_1100);
    let one_nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000));
    let values = _mm512_fixupimm_ps::<0>(one_nan, values, classes);
    _mm512_add_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(0x80))
}

/// The bits of `a` where `mask` has ones, and of `b` elsewhere.
#[inline]
#[target_feature(enable = "avx512f")]
fn select(mask: i32, a: __m512i, b: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(mask), a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn split_bf16_24(
    values: &[f32; CODED_PAIR],
    params: &mut [u16; CODED_PAIR],
    remainders: &mut [i8; CODED_PAIR],
) {
    let mut bits = [_mm512_setzero_si512(); VECTORS];
    for (at, bits) in bits.iter_mut().enumerate() {
        *bits = rounded_24(load(values, at));
    }
    let [a, b, c, d] = bits;
    let half = _mm512_set1_epi32(0x8000);
    store_upper([_mm512_add_epi32(a, half), _mm512_add_epi32(b, half)], params, 0);
    store_upper([_mm512_add_epi32(c, half), _mm512_add_epi32(d, half)], params, 1);
    // The second bytes of four vectors as the bytes of one, whose dwords are transposed by fours.
    let ab = select(0xff, _mm512_srli_epi32::<8>(a), b);
    let cd = select(0xff_0000, _mm512_slli_epi32::<8>(c), _mm512_slli_epi32::<16>(d));
    let bytes = select(0xffff, ab, cd);
    let quarter = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = in_order(_mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(quarter)));
    // SAFETY: an array of 64 bytes, which need no alignment for this store.
    unsafe { _mm512_storeu_si512(remainders.as_mut_ptr().cast(), bytes) }
}
