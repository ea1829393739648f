//! A text, and the transformer that learns it character by character.

use std::io::Read;

use anyhow::{Context, ensure};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use flate2::read::GzDecoder;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::{Task, Tested, Transformer};

const FILE: &[u8] = include_bytes!("../data/shakespeare.txt.gz");

/// Reciprocal of the share of characters held back for the test, at the end of the text.
const HELD_BACK: usize = 10;
/// Most windows of an epoch.
const EPOCH: usize = 512;
/// Most windows of the test, spread evenly over the characters held back.
const TEST_WINDOWS: usize = 64;
/// Windows tested together.
const TEST_BATCH: usize = 16;
/// Number of characters that a model writes.
const WRITTEN: usize = 200;

/// A text cut into windows of the model's context, and the transformer that learns the text. Each
/// distinct character is a token; tokens are numbered in the order of the characters' codes.
#[derive(Clone, Debug)]
pub struct Text {
    characters: Vec<char>,
    tokens: Vec<u32>,
    model: Transformer,
    /// Number of tokens to learn from; the rest is for the test.
    learned: usize,
}

impl Text {
    /// The Shakespeare of this crate, for a model of these sizes; the vocabulary is the text's.
    ///
    /// # Errors
    /// Those of [`Text::of`]; data that was damaged in the binary.
    pub fn shakespeare(model: Transformer) -> anyhow::Result<Self> {
        let mut text = String::new();
        GzDecoder::new(FILE)
            .read_to_string(&mut text)
            .context("the text in this binary is damaged; build it anew")?;
        Self::of(&text, model)
    }

    /// A text of the caller's, cut into windows.
    ///
    /// # Errors
    /// Those of [`Transformer::validate`]; a text too short for one window to learn and one to
    /// test.
    pub fn of(text: &str, model: Transformer) -> anyhow::Result<Self> {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let token = |c: char| characters.binary_search(&c).unwrap_or_default() as u32;
        let tokens: Vec<u32> = text.chars().map(token).collect();
        let vocabulary = characters.len();
        let model = Transformer { vocabulary, ..model };
        model.validate()?;
        let (context, found) = (model.context, tokens.len());
        let least = HELD_BACK * (context + 1);
        ensure!(
            found >= least,
            "text: expected at least {least} characters for a context of {context}, found {found}; \
             take a smaller context"
        );
        Ok(Self { characters, tokens, model, learned: found - found / HELD_BACK })
    }

    /// The model.
    pub fn model(&self) -> Transformer {
        self.model
    }

    /// Tokens of windows that begin at these positions of the text, and the tokens that follow.
    fn windows(&self, starts: impl Iterator<Item = usize>) -> Result<[Tensor; 2]> {
        let context = self.model.context;
        let (mut tokens, mut next, mut count) = (Vec::new(), Vec::new(), 0);
        for start in starts {
            tokens.extend_from_slice(&self.tokens[start..start + context]);
            next.extend_from_slice(&self.tokens[start + 1..start + context + 1]);
            count += 1;
        }
        Ok([
            Tensor::from_vec(tokens, (count, context), &Device::Cpu)?,
            Tensor::from_vec(next, (count, context), &Device::Cpu)?,
        ])
    }

    /// The positions at which the windows of the test begin.
    fn test_windows(&self) -> Vec<usize> {
        let windows = (self.tokens.len() - self.learned - 1) / self.model.context;
        let every = windows.div_ceil(TEST_WINDOWS).max(1);
        let starts = (0..windows).step_by(every);
        starts.map(|at| self.learned + at * self.model.context).collect()
    }
}

impl Task for Text {
    fn describe(&self) -> String {
        format!(
            "{} characters of Shakespeare to learn from and {} to test on, {} distinct",
            self.learned,
            self.tokens.len() - self.learned,
            self.characters.len()
        )
    }

    fn samples(&self) -> usize {
        (self.learned - 1) / self.model.context
    }

    fn samples_of_epoch(&self) -> usize {
        self.samples().min(EPOCH)
    }

    fn tokens(&self) -> &'static str {
        "characters"
    }

    fn answers(&self) -> usize {
        self.characters.len()
    }

    fn tokens_of_sample(&self) -> usize {
        self.model.context
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.model.shapes()
    }

    fn start(&self, seed: u64, dtype: DType) -> Result<Vec<Var>> {
        self.model.start(seed, dtype)
    }

    fn loss(&self, vars: &[Var], samples: &[usize]) -> Result<Tensor> {
        let starts = samples.iter().map(|&sample| sample * self.model.context);
        let [tokens, next] = self.windows(starts)?;
        self.model.loss(vars, &tokens, &next)
    }

    fn test(&self, vars: &[Var]) -> Result<Tested> {
        // Values alone: nothing is differentiated here, so no intermediate values are kept.
        let (mut loss, mut right, mut count) = (0.0, 0.0, 0.0);
        for starts in self.test_windows().chunks(TEST_BATCH) {
            let [tokens, next] = self.windows(starts.iter().copied())?;
            let logits = self.model.logits(vars, &tokens)?.detach();
            let next = next.flatten_all()?;
            let of_batch = candle_nn::loss::cross_entropy(&logits, &next)?;
            let found = logits.argmax(D::Minus1)?.eq(&next)?.to_dtype(DType::F32)?;
            let windows = starts.len() as f64;
            loss += windows * f64::from(of_batch.to_scalar::<f32>()?);
            right += windows * f64::from(found.mean_all()?.to_scalar::<f32>()?);
            count += windows;
        }
        Ok(Tested { loss: loss / count, accuracy: right / count })
    }

    fn write(&self, vars: &[Var], seed: u64) -> Result<Option<String>> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // The text's own first character, as a place to begin from.
        let start = &self.tokens[..1];
        let tokens = self.model.generate(vars, start, WRITTEN, &mut rng)?;
        let character = |&token: &u32| self.characters.get(token as usize);
        Ok(Some(tokens.iter().filter_map(character).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_the_text_and_what_follows() {
        let text = Text::shakespeare(Transformer::default()).unwrap();
        assert_eq!((text.tokens.len(), text.characters.len()), (1_115_394, 65));
        let read = |tokens: &Tensor| -> String {
            let tokens = tokens.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            let character = |token: u32| text.characters[token as usize];
            tokens.into_iter().map(character).collect()
        };
        let [tokens, next] = text.windows([0, 15].into_iter()).unwrap();
        let (tokens, next) = (read(&tokens), read(&next));
        assert!(tokens.starts_with("First Citizen:\nBefore we proceed"));
        assert_eq!(tokens[1..64], next[..63]);
        assert_eq!(tokens[65..], next[64..127]);
        // Nothing that is tested has been learned.
        let learned = text.samples() * 64;
        assert!(text.test_windows().iter().all(|&start| start > learned));
        assert_eq!(text.test_windows().len(), 63);
    }

    #[test]
    fn a_text_too_short_is_refused() {
        let error = Text::of("to be or not to be", Transformer::default()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("at least 650 characters") && error.contains("found 18"));
    }
}
