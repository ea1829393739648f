//! Inputs from inputs.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Words that the formats are made of, and numbers at which arithmetic breaks.
const WORDS: [&str; 34] = [
    "0",
    "1",
    "-1",
    "255",
    "256",
    "4294967295",
    "4294967296",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1125899906842624",
    "1e309",
    "NaN",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "[[[[",
    "\"F32\"",
    "\"BF16\"",
    "\"F64\"",
    "\"U8\"",
    "\"I64\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"dtype\"",
    "\"__metadata__\"",
    "\\u202e",
    "\u{0}",
    "..",
    "@",
];

/// Bytes of a long run of one.
const LONG: usize = 5_000;

/// Longest input.
const MOST_BYTES: usize = 1 << 16;

/// Draws inputs.
pub(crate) struct Mutator {
    rng: ChaCha8Rng,
}

impl Mutator {
    pub(crate) fn new(seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    fn below(&mut self, end: usize) -> usize {
        self.rng.random_range(0..end.max(1))
    }

    /// One of the corpus, changed in up to eight places.
    pub(crate) fn next(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut input = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(8) {
            self.change(&mut input, corpus);
        }
        input.truncate(MOST_BYTES);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let at = self.below(input.len() + 1);
        let end = (at + self.below(32)).min(input.len());
        match self.below(10) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.below(256) as u8,
            2 => drop(input.drain(at..end)),
            3 => {
                let piece = input[at..end].to_vec();
                let to = self.below(input.len() + 1);
                input.splice(to..to, piece);
            }
            4 => {
                let word = WORDS[self.below(WORDS.len())].bytes();
                input.splice(at..end, word);
            }
            5 => self.change_number(input),
            6 => {
                let other = &corpus[self.below(corpus.len())];
                let from = self.below(other.len() + 1);
                let to = (from + self.below(256)).min(other.len());
                input.splice(at..end, other[from..to].to_vec());
            }
            7 => self.mend_length(input),
            // So long that whoever quotes it whole says too much.
            8 => {
                let byte = b"x/\x1b\xe2"[self.below(4)];
                input.splice(at..end, vec![byte; LONG]);
            }
            _ => input.truncate(at),
        }
    }

    /// Puts another number in place of one that stands there as text.
    fn change_number(&mut self, input: &mut Vec<u8>) {
        let digits: Vec<usize> =
            (0..input.len()).filter(|&at| input[at].is_ascii_digit()).collect();
        if digits.is_empty() {
            return;
        }
        let at = digits[self.below(digits.len())];
        let end = (at..input.len()).find(|&at| !input[at].is_ascii_digit()).unwrap_or(input.len());
        let word = WORDS[self.below(13)].bytes();
        input.splice(at..end, word);
    }

    /// Makes the length before the text that of the text behind it, so that changes of the text
    /// get past it.
    fn mend_length(&mut self, input: &mut [u8]) {
        let Some(close) = input.iter().rposition(|&byte| byte == b'}') else {
            return;
        };
        // Behind the byte that one target draws from, where the text begins so.
        let open = if input.get(9) == Some(&b'{') { 9 } else { 8 };
        if close >= open {
            let length = (close + 1 - open) as u64;
            input[open - 8..open].copy_from_slice(&length.to_le_bytes());
        }
    }
}

/// Numbers from bytes, for targets that are not files; beyond the end all are 0.
pub(crate) struct Numbers<'a>(pub(crate) &'a [u8]);

impl Numbers<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// A number of up to 64 bits, small ones as likely as large ones.
    pub(crate) fn wide(&mut self) -> u64 {
        let bits = u32::from(self.byte() % 65);
        let number = (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte()));
        if bits == 0 { 0 } else { number >> (64 - bits) }
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.wide() % end.max(1)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
