//! A text to learn, character by character.

use std::io::Read;

use anyhow::{Context, ensure};
use candle_core::{D, DType, Device, Tensor, Var};
use flate2::read::GzDecoder;
use fusestep_tensor::ParamDesc;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::{Task, Tested, Transformer, TransformerConfig};

const FILE: &[u8] = include_bytes!("../../../data/shakespeare.txt.gz");

/// One character in so many is held back for the test, at the end.
const HELD_BACK: usize = 10;
/// Windows of the test, spread evenly over what is held back.
const TEST_WINDOWS: usize = 64;
/// Windows that are tested together.
const TEST_BATCH: usize = 8;
/// Characters that a trained model writes.
const WRITTEN: usize = 300;

/// A text as tokens: one for each distinct character, in the order of their codes.
#[derive(Clone, Debug)]
pub struct Corpus {
    characters: Vec<char>,
    tokens: Vec<u32>,
}

impl Corpus {
    /// The Shakespeare in this binary.
    ///
    /// # Errors
    /// Data that was damaged in the binary.
    pub fn shakespeare() -> anyhow::Result<Self> {
        let mut text = String::new();
        GzDecoder::new(FILE)
            .read_to_string(&mut text)
            .context("the text in this binary is damaged; build it anew")?;
        Ok(Self::new(&text))
    }

    /// Any text.
    pub fn new(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let token = |c: char| characters.binary_search(&c).unwrap_or_default() as u32;
        let tokens = text.chars().map(token).collect();
        Self { characters, tokens }
    }

    /// The tokens of the text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many distinct tokens there are.
    pub fn vocabulary(&self) -> usize {
        self.characters.len()
    }

    /// Tokens as a text; unknown ones are left out.
    pub fn text(&self, tokens: &[u32]) -> String {
        let character = |&token: &u32| self.characters.get(token as usize);
        tokens.iter().filter_map(character).collect()
    }
}

/// A text cut into windows, and the transformer that learns it.
#[derive(Clone, Debug)]
pub struct Text {
    corpus: Corpus,
    config: TransformerConfig,
    /// Tokens to learn from; the rest is for the test.
    learned: usize,
}

impl Text {
    /// Shakespeare, for a model of these sizes; the vocabulary is the text's.
    ///
    /// # Errors
    /// As [`Text::of`].
    pub fn shakespeare(config: TransformerConfig) -> anyhow::Result<Self> {
        Self::of(Corpus::shakespeare()?, config)
    }

    /// A text of one's own.
    ///
    /// # Errors
    /// As [`TransformerConfig::validate`]; a text too short for a window to learn and one to test.
    pub fn of(corpus: Corpus, config: TransformerConfig) -> anyhow::Result<Self> {
        let config = TransformerConfig {
            vocabulary: corpus.vocabulary(),
            ..config
        };
        config.validate()?;
        let learned = corpus.tokens.len() - corpus.tokens.len() / HELD_BACK;
        let least = HELD_BACK * (config.context + 1);
        ensure!(
            corpus.tokens.len() >= least,
            "text: expected at least {least} characters for a context of {}, found {}; take a \
             smaller context",
            config.context,
            corpus.tokens.len()
        );
        Ok(Self {
            corpus,
            config,
            learned,
        })
    }

    /// The text.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The sizes of the model.
    pub fn config(&self) -> TransformerConfig {
        self.config
    }

    /// Tokens of windows that begin at these positions of the text, and the tokens that follow.
    fn windows(&self, starts: impl Iterator<Item = usize>) -> candle_core::Result<[Tensor; 2]> {
        let context = self.config.context;
        let (mut tokens, mut next, mut count) = (Vec::new(), Vec::new(), 0);
        for start in starts {
            tokens.extend_from_slice(&self.corpus.tokens[start..start + context]);
            next.extend_from_slice(&self.corpus.tokens[start + 1..start + context + 1]);
            count += 1;
        }
        Ok([
            Tensor::from_vec(tokens, (count, context), &Device::Cpu)?,
            Tensor::from_vec(next, (count, context), &Device::Cpu)?,
        ])
    }

    /// Tokens of the training windows at these positions, and the tokens that follow them.
    ///
    /// # Errors
    /// Those of candle.
    pub fn batch(&self, samples: &[usize]) -> candle_core::Result<[Tensor; 2]> {
        self.windows(samples.iter().map(|&sample| sample * self.config.context))
    }

    /// Where the windows of the test begin.
    fn test_windows(&self) -> Vec<usize> {
        let windows = (self.corpus.tokens.len() - self.learned - 1) / self.config.context;
        let every = windows.div_ceil(TEST_WINDOWS).max(1);
        let starts = (0..windows).step_by(every);
        starts.map(|at| self.learned + at * self.config.context).collect()
    }

    fn model(&self, vars: &[Var]) -> candle_core::Result<Transformer> {
        Transformer::with_vars(self.config, vars.to_vec())
    }
}

impl Task for Text {
    fn describe(&self) -> String {
        format!(
            "{} characters of Shakespeare to learn from and {} to test on, {} distinct",
            self.learned,
            self.corpus.tokens.len() - self.learned,
            self.corpus.vocabulary()
        )
    }

    fn samples(&self) -> usize {
        (self.learned - 1) / self.config.context
    }

    fn tokens_per_sample(&self) -> usize {
        self.config.context
    }

    fn params(&self, dtype: fusestep_tensor::DType) -> anyhow::Result<Vec<ParamDesc>> {
        self.config.params(dtype)
    }

    fn start(&self, seed: u64, dtype: DType) -> candle_core::Result<Vec<Var>> {
        Ok(Transformer::new(self.config, seed, dtype)?.vars().to_vec())
    }

    fn loss(&self, vars: &[Var], samples: &[usize]) -> candle_core::Result<Tensor> {
        let [tokens, next] = self.batch(samples)?;
        self.model(vars)?.loss(&tokens, &next)
    }

    fn test(&self, vars: &[Var]) -> candle_core::Result<Tested> {
        let model = self.model(vars)?;
        // Nothing is differentiated here.
        let (mut loss, mut right, mut count) = (0.0, 0.0, 0.0);
        for starts in self.test_windows().chunks(TEST_BATCH) {
            let [tokens, next] = self.windows(starts.iter().copied())?;
            let (logits, next) = (model.logits(&tokens)?.detach(), next.flatten_all()?);
            let of_batch = candle_nn::loss::cross_entropy(&logits, &next)?;
            let found = logits.argmax(D::Minus1)?.eq(&next)?;
            let windows = starts.len() as f64;
            loss += windows * of_batch.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            right += windows * found.to_dtype(DType::F64)?.mean_all()?.to_scalar::<f64>()?;
            count += windows;
        }
        Ok(Tested {
            loss: loss / count,
            accuracy: right / count,
        })
    }

    fn sample(&self, vars: &[Var], seed: u64) -> candle_core::Result<Option<String>> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // The text's own first character, as a place to begin from.
        let start = &self.corpus.tokens[..1];
        let tokens = self.model(vars)?.generate(start, WRITTEN, &mut rng)?;
        Ok(Some(self.corpus.text(&tokens)))
    }
}
