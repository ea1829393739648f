//! Random bits that depend on (seed, step, parameter, element) and on nothing else.
//!
//! A generator without a state: any part of any tensor can be rounded by any thread, block or
//! launch, in any order, and gets the bits it would get alone. Keys are formed in 64 bits, words of
//! one element in 32, because that is what vector units multiply.
//!
//! ```text
//! key of a step     = mix64(mix64(seed + G) + step·G)              G = 0x9e3779b97f4a7c15
//! key of a tensor   = mix64(key of the step + (parameter + 1)·G)   (a, b) = its lower, upper half
//! word of an element= mix32(mix32(e + a) ^ (b + e'·0x9e3779b9 + word·0x85ebca6b))
//! ```
//! e and e' are the lower and the upper half of the element's index in its tensor.
//! `kernels/dialect.cuh` computes the same.
//!
//! mix64 is the finalizer of SplitMix64 (Steele, Lea & Flood 2014, with Stafford's 13th constants),
//! mix32 Wellons' `lowbias32` (<https://nullprogram.com/blog/2018/07/31/>); both are bijections
//! that let every input bit turn every output bit with a probability near 1/2. Not for secrets.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const HIGH: u32 = 0x9e37_79b9;
const WORD: u32 = 0x85eb_ca6b;

/// The key of one step.
pub fn step_key(seed: u64, step: u64) -> u64 {
    let seeded = mix64(seed.wrapping_add(GOLDEN));
    mix64(seeded.wrapping_add(step.wrapping_mul(GOLDEN)))
}

/// The key of a parameter's tensors at the step of this key.
#[inline(always)]
pub fn tensor_key(step_key: u64, parameter: u32) -> u64 {
    mix64(step_key.wrapping_add((u64::from(parameter) + 1).wrapping_mul(GOLDEN)))
}

/// 32 random bits of an element whose index has these halves; different `word` give different bits.
#[inline(always)]
pub fn element_word(tensor_key: u64, low: u32, high: u32, word: u32) -> u32 {
    let (a, b) = (tensor_key as u32, (tensor_key >> 32) as u32);
    let b = b.wrapping_add(high.wrapping_mul(HIGH)).wrapping_add(word.wrapping_mul(WORD));
    mix32(mix32(low.wrapping_add(a)) ^ b)
}

#[inline(always)]
fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[inline(always)]
fn mix32(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: u32 = 1 << 18;

    fn words(seed: u64, step: u64, parameter: u32, word: u32) -> Vec<u32> {
        let key = tensor_key(step_key(seed, step), parameter);
        let words = (0..COUNT).map(|element| element_word(key, element, 0, word));
        words.collect()
    }

    /// Computed in Python from the formulas above; `mix64(G)` is also the first number of
    /// SplitMix64 from 0.
    #[test]
    fn keys_and_words_are_those_of_the_formulas() {
        assert_eq!(mix64(GOLDEN), 0xe220_a839_7b1d_cdaf);
        assert_eq!(step_key(0, 0), 0x4821_8226_ff3c_d4bf);
        let step = step_key(7, 3);
        assert_eq!(step, 0x8ca3_cbb6_ca63_129b);
        let tensor = tensor_key(step, 2);
        assert_eq!(tensor, 0x183c_5150_f473_d59f);
        assert_eq!(element_word(tensor, 5, 0, 0), 0x23b6_a4ad);
        assert_eq!(element_word(tensor, 5, 1, 1), 0x7ba5_d35a);
    }

    /// Chi-squared of 256 equally likely groups: 255 expected, standard deviation 22.6.
    fn chi_squared(groups: impl Iterator<Item = u8>) -> f64 {
        let mut counts = [0u32; 256];
        groups.for_each(|group| counts[usize::from(group)] += 1);
        let total: u32 = counts.iter().sum();
        let expected = f64::from(total) / 256.0;
        let squares = counts.map(|n| (f64::from(n) - expected).powi(2) / expected);
        squares.iter().sum()
    }

    #[test]
    fn every_byte_and_every_pair_of_neighbours_is_uniform() {
        for (seed, step, parameter) in [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0), (7, 1000, 99)] {
            for word in 0..2 {
                let words = words(seed, step, parameter, word);
                for shift in [0, 8, 16, 24] {
                    let byte = words.iter().map(|w| (w >> shift) as u8);
                    let found = chi_squared(byte);
                    // Six standard deviations on each side.
                    assert!((120.0..390.0).contains(&found), "byte {shift}: {found}");
                    let pairs = words.windows(2).map(|w| {
                        let (left, right) = (w[0] >> shift & 15, w[1] >> shift & 15);
                        (left << 4 | right) as u8
                    });
                    let found = chi_squared(pairs);
                    assert!((120.0..390.0).contains(&found), "pairs {shift}: {found}");
                }
            }
        }
    }

    #[test]
    fn neighbouring_keys_are_not_correlated() {
        let base = words(5, 10, 3, 0);
        for (what, other) in [
            ("seed", words(6, 10, 3, 0)),
            ("step", words(5, 11, 3, 0)),
            ("parameter", words(5, 10, 4, 0)),
            ("word", words(5, 10, 3, 1)),
            ("next element", base[1..].to_vec()),
        ] {
            let same: u64 =
                base.iter().zip(&other).map(|(a, b)| u64::from((!(a ^ b)).count_ones())).sum();
            let bits = 32.0 * other.len() as f64;
            let deviations = (same as f64 - bits / 2.0) / (bits.sqrt() / 2.0);
            assert!(deviations.abs() < 6.0, "{what}: {deviations} deviations");
        }
    }

    #[test]
    fn elements_beyond_32_bits_have_words_of_their_own() {
        let key = tensor_key(step_key(1, 1), 0);
        let same =
            (0..1000).filter(|&low| element_word(key, low, 0, 0) == element_word(key, low, 1, 0));
        assert_eq!(same.count(), 0);
    }
}
