#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod digits;
mod mlp;
mod ops;
mod text;
mod transformer;
mod values;

use candle_core::{DType, Tensor, Var};
use fusestep_tensor::ParamDesc;

pub use digits::{Digits, Images};
pub use mlp::Mlp;
pub use text::{Corpus, Text};
pub use transformer::{Transformer, TransformerConfig};
pub use values::{bytes_of, vars_of};

/// Something to learn: a model as a function of its parameters, and data to train and test it on.
pub trait Task: Send + Sync {
    /// What is learned, for people: `1437 training and 360 test images of handwritten digits`.
    fn describe(&self) -> String;

    /// Training samples.
    fn samples(&self) -> usize;

    /// Characters, images or whatever else a loss is the mean of, in one sample.
    fn tokens_per_sample(&self) -> usize;

    /// What a plan has to know of the parameters, in their order.
    ///
    /// # Errors
    /// A model too large to describe.
    fn params(&self, dtype: fusestep_tensor::DType) -> anyhow::Result<Vec<ParamDesc>>;

    /// The first values of all parameters, which follow from `seed` alone.
    ///
    /// # Errors
    /// Those of candle.
    fn start(&self, seed: u64, dtype: DType) -> candle_core::Result<Vec<Var>>;

    /// The mean loss of the training samples at these positions.
    ///
    /// # Errors
    /// Those of candle.
    fn loss(&self, vars: &[Var], samples: &[usize]) -> candle_core::Result<Tensor>;

    /// How the model does on data that it was not trained on.
    ///
    /// # Errors
    /// Those of candle.
    fn test(&self, vars: &[Var]) -> candle_core::Result<Tested>;

    /// Something that the model has made, if it makes anything.
    ///
    /// # Errors
    /// Those of candle.
    fn sample(&self, vars: &[Var], seed: u64) -> candle_core::Result<Option<String>>;
}

/// How a model does on data that it was not trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tested {
    /// Mean loss.
    pub loss: f64,
    /// Share of answers that are right when the most likely one is taken.
    pub accuracy: f64,
}
