//! Samples of tensors' values, which reveal writes that no version counts.

/// Most words of a tensor that are sampled.
const MOST_WORDS: usize = 64;
/// Bytes of a word.
const WORD: usize = 8;

/// A hash of the sampled words of `bytes`: all words of a short tensor, else evenly spread ones,
/// with the first and the last.
pub(crate) fn sample(bytes: &[u8]) -> u64 {
    let words = bytes.len() / WORD;
    let taken = words.min(MOST_WORDS);
    let mut sampled = bytes.len() as u64;
    let mut mix = |word: &[u8]| {
        let mut whole = [0; WORD];
        whole[..word.len()].copy_from_slice(word);
        sampled = (sampled ^ u64::from_le_bytes(whole)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        sampled ^= sampled >> 29;
    };
    for number in 0..taken {
        let at = number * (words - 1) / (taken - 1).max(1) * WORD;
        mix(&bytes[at..at + WORD]);
    }
    mix(&bytes[words * WORD..]);
    sampled
}
