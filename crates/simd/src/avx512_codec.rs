//! The codec of AVX-512: 16 values at a time, and conversions to bytes in one instruction each.
//! Compilers make three or four times as many of the portable loops.

use std::arch::x86_64::*;

use crate::codec::{CODED_GROUP, Codec, codec_of_module};
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

/// Places of the halves of a group.
const HALVES: [usize; 2] = [0, 16];

/// The 16 values from `at` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; CODED_GROUP], at: usize) -> __m512 {
    let sixteen = &values[at..at + 16];
    // SAFETY: a slice of 16 f32, whose bytes need no alignment for this load.
    unsafe { _mm512_loadu_ps(sixteen.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(values: __m512, to: &mut [f32]) {
    let sixteen = &mut to[..16];
    // SAFETY: a slice of 16 f32, whose bytes need no alignment for this store.
    unsafe { _mm512_storeu_ps(sixteen.as_mut_ptr(), values) }
}

/// The 16 bytes from `at` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_bytes(bytes: &[u8; CODED_GROUP], at: usize) -> __m128i {
    let sixteen = &bytes[at..at + 16];
    // SAFETY: a slice of 16 bytes, which need no alignment for this load.
    unsafe { _mm_loadu_si128(sixteen.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_bytes(values: __m128i, to: &mut [u8]) {
    let sixteen = &mut to[..16];
    // SAFETY: a slice of 16 bytes, which need no alignment for this store.
    unsafe { _mm_storeu_si128(sixteen.as_mut_ptr().cast(), values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_words(values: __m256i, to: &mut [u16]) {
    let sixteen = &mut to[..16];
    // SAFETY: a slice of 16 words, which need no alignment for this store.
    unsafe { _mm256_storeu_si256(sixteen.as_mut_ptr().cast(), values) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_signed(codes: &[u8; CODED_GROUP], values: &mut [f32; CODED_GROUP]) {
    for at in HALVES {
        // S.EE.MMMMM becomes the half S.000EE.MMMMM00000.
        let words = _mm256_slli_epi16::<5>(_mm256_cvtepi8_epi16(load_bytes(codes, at)));
        let halves = _mm256_and_si256(words, _mm256_set1_epi16(0x8fe0_u16 as i16));
        store(_mm512_cvtph_ps(halves), &mut values[at..]);
    }
}

/// Values without their signs.
#[inline]
#[target_feature(enable = "avx512f")]
fn magnitudes(values: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(i32::MAX))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn encode_signed(values: &[f32; CODED_GROUP], factor: f32, codes: &mut [u8; CODED_GROUP]) {
    let factor = _mm512_set1_ps(factor);
    for at in HALVES {
        let value = load(values, at);
        let t = _mm512_mul_ps(_mm512_castsi512_ps(magnitudes(value)), factor);
        // Halves and quarters are exact, so a fused addition rounds as two operations do.
        let half = _mm512_fmadd_ps(t, _mm512_set1_ps(0.5), _mm512_set1_ps(32.0));
        let quarter = _mm512_fmadd_ps(t, _mm512_set1_ps(0.25), _mm512_set1_ps(64.0));
        let least = _mm512_min_ps(t, _mm512_min_ps(half, quarter));
        let sign = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(i32::MIN));
        let signed = _mm512_or_si512(_mm512_castps_si512(least), sign);
        // Saturation makes the code of a NaN −128.
        let bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_castsi512_ps(signed)));
        let sign = _mm_and_si128(bytes, _mm_set1_epi8(-128));
        store_bytes(_mm_or_si128(_mm_abs_epi8(bytes), sign), &mut codes[at..]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn encode_positive(
    values: &[f32; CODED_GROUP],
    factor: f32,
    dither: &[f32; CODED_GROUP],
    codes: &mut [u8; CODED_GROUP],
) {
    let factor = _mm512_set1_ps(factor);
    for at in HALVES {
        let x = _mm512_add_ps(_mm512_mul_ps(load(values, at), factor), load(dither, at));
        // The second operand where one is NaN: 1.
        let held = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(1.0)), _mm512_set1_ps(255.0));
        store_bytes(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(held)), &mut codes[at..]);
    }
}

/// Largest magnitudes of each place of 16, as integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn most(values: &[f32; CODED_GROUP]) -> __m512i {
    _mm512_max_epu32(magnitudes(load(values, 0)), magnitudes(load(values, 16)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn largest(lists: [&[f32; CODED_GROUP]; 2]) -> [f32; 2] {
    let (a, b) = (most(lists[0]), most(lists[1]));
    // Places of both lists take turns, so that one tree serves both.
    let pairs = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let [low, high] = [_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64::<1>(pairs)];
    let quarter = _mm256_max_epu32(low, high);
    let [low, high] = [_mm256_castsi256_si128(quarter), _mm256_extracti128_si256::<1>(quarter)];
    let halves = _mm_max_epu32(low, high);
    let both = _mm_castsi128_ps(_mm_max_epu32(halves, _mm_unpackhi_epi64(halves, halves)));
    [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_bf16(values: &[f32; CODED_GROUP], narrow: &mut [u16; CODED_GROUP]) {
    for at in HALVES {
        let value = load(values, at);
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let rounded = _mm512_mask_mov_epi32(sum, nan, quiet);
        store_words(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)), &mut narrow[at..]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn join_bf16_24(
    params: &[u16; CODED_GROUP],
    remainders: &[i8; CODED_GROUP],
    values: &mut [f32; CODED_GROUP],
) {
    for at in HALVES {
        let (words, bytes) = (&params[at..at + 16], &remainders[at..at + 16]);
        // SAFETY: slices of 16 words and 16 bytes, which need no alignment for these loads.
        let (words, bytes) = unsafe {
            (_mm256_loadu_si256(words.as_ptr().cast()), _mm_loadu_si128(bytes.as_ptr().cast()))
        };
        let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words));
        let low = _mm512_slli_epi32::<8>(_mm512_cvtepi8_epi32(bytes));
        store(_mm512_castsi512_ps(_mm512_add_epi32(high, low)), &mut values[at..]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn split_bf16_24(
    values: &[f32; CODED_GROUP],
    params: &mut [u16; CODED_GROUP],
    remainders: &mut [i8; CODED_GROUP],
) {
    for at in HALVES {
        let value = load(values, at);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let one_nan = _mm512_set1_epi32(0x7fc0_0000);
        let bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), nan, one_nan);
        let rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x80));
        let param = _mm512_add_epi32(rounded, _mm512_set1_epi32(0x8000));
        store_words(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(param)), &mut params[at..]);
        let bytes = _mm512_cvtepi32_epi8(_mm512_srli_epi32::<8>(rounded));
        let sixteen = &mut remainders[at..at + 16];
        // SAFETY: a slice of 16 bytes, which need no alignment for this store.
        unsafe { _mm_storeu_si128(sixteen.as_mut_ptr().cast(), bytes) }
    }
}
