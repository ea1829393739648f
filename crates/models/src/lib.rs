#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod digits;
mod images;
mod mlp;
mod text;
mod transformer;

use candle_core::{DType, Result, Tensor, Var};

pub use digits::Digits;
pub use text::Text;
pub use transformer::Transformer;

/// A task to learn: a model as a function of its variables, and data to train and test it on.
pub trait Task: Send + Sync {
    /// A description for people: `1437 training and 360 test images of handwritten digits`.
    fn describe(&self) -> String;

    /// The number of training samples, which are numbered from 0.
    fn samples(&self) -> usize;

    /// The number of samples between two tests: all samples, unless there are very many.
    fn samples_of_epoch(&self) -> usize {
        self.samples()
    }

    /// The name of a sample's tokens, in the plural: `images`, `characters`.
    fn tokens(&self) -> &'static str;

    /// The number of tokens in a sample.
    fn tokens_of_sample(&self) -> usize {
        1
    }

    /// The number of answers among which the model chooses one for each token; images have a class.
    fn answers(&self) -> usize;

    /// The names and extents of the variables, in their order.
    fn shapes(&self) -> Vec<(String, Vec<usize>)>;

    /// The first values of all variables, which depend on `seed` alone and not on the framework's
    /// generator. They are rounded to `dtype` and kept in it; arithmetic is f32.
    ///
    /// # Errors
    /// Those of candle.
    fn start(&self, seed: u64, dtype: DType) -> Result<Vec<Var>>;

    /// The mean loss of these training samples.
    ///
    /// # Errors
    /// Those of candle: variables of other shapes than [`Task::shapes`].
    fn loss(&self, vars: &[Var], samples: &[usize]) -> Result<Tensor>;

    /// The model's loss and accuracy on data that it is not trained on.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn test(&self, vars: &[Var]) -> Result<Tested>;

    /// A text that the model writes, drawn by `seed`; `None` if the model writes none.
    ///
    /// # Errors
    /// As [`Task::loss`].
    fn write(&self, _vars: &[Var], _seed: u64) -> Result<Option<String>> {
        Ok(None)
    }
}

/// Loss and accuracy of a model on data that it is not trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tested {
    /// Mean cross-entropy, in nats.
    pub loss: f64,
    /// Share of answers that are right when the most likely one is taken.
    pub accuracy: f64,
}
