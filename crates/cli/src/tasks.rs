//! What `train` trains: the model of the digits, or a transformer; and the learning rates at which
//! rules learn it.

use std::fmt::Write as _;
use std::num::NonZeroUsize;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use fusestep_models::{Digits, Task, Text, Transformer};

use crate::options::name_of;
use crate::ranks::whole;
use crate::rules::Rule;

/// Most scores of attention in a layer, for one sample: 1,024 characters with 4 heads, with which a
/// step takes some 5 GiB.
const MOST_SCORES: usize = 1 << 22;

/// Most of each of the transformer's sizes, as the model has it.
const MOST_SIZE: u64 = 1 << 16;

/// A model with its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Model {
    /// A perceptron on images of handwritten digits, 17,226 elements
    Digits,
    /// A decoder-only transformer on the characters of Shakespeare, 3.2 million elements
    Transformer,
}

/// Flags that say what is trained.
#[derive(Debug, Args)]
pub(crate) struct TaskArgs {
    /// What is trained, and on what
    #[arg(long, value_enum, default_value = "digits")]
    pub(crate) model: Model,
    /// Layers of the transformer [default: 4]
    #[arg(long, value_name = "N", value_parser = whole::<NonZeroUsize, 1, MOST_SIZE>)]
    layers: Option<NonZeroUsize>,
    /// Elements of a position between the transformer's layers [default: 256]
    #[arg(long, value_name = "N", value_parser = whole::<NonZeroUsize, 1, MOST_SIZE>)]
    width: Option<NonZeroUsize>,
    /// Heads of the transformer's attention, a divisor of the width [default: 4]
    #[arg(long, value_name = "N", value_parser = whole::<NonZeroUsize, 1, MOST_SIZE>)]
    heads: Option<NonZeroUsize>,
    /// Characters that the transformer sees [default: 64]
    #[arg(long, value_name = "N", value_parser = whole::<NonZeroUsize, 1, MOST_SIZE>)]
    context: Option<NonZeroUsize>,
}

impl TaskArgs {
    /// The model and its data; `seed` decides what is held back, where that is drawn.
    pub(crate) fn task(&self, seed: u64) -> anyhow::Result<Box<dyn Task>> {
        if self.model == Model::Digits {
            let sizes = [
                ("--layers", self.layers),
                ("--width", self.width),
                ("--heads", self.heads),
                ("--context", self.context),
            ];
            let given = sizes.iter().find(|(_, size)| size.is_some());
            ensure!(
                given.is_none(),
                "{}: expected --model transformer, found digits, whose sizes are fixed",
                given.map_or("", |(flag, _)| flag)
            );
            return Ok(Box::new(Digits::load(seed)?));
        }
        let or = |size: Option<NonZeroUsize>, default| size.map_or(default, NonZeroUsize::get);
        let default = Transformer::default();
        let model = Transformer {
            layers: or(self.layers, default.layers),
            width: or(self.width, default.width),
            heads: or(self.heads, default.heads),
            context: or(self.context, default.context),
            ..default
        };
        ensure!(
            model.width.is_multiple_of(model.heads),
            "--width: expected a multiple of the {} of --heads, found {}",
            model.heads,
            model.width
        );
        let text = Text::shakespeare(model)?;
        // candle asks for memory and ends the program where there is none.
        let scores = model.heads * model.context * model.context;
        ensure!(
            scores <= MOST_SCORES,
            "--context: expected heads times context squared of at most {MOST_SCORES}, found \
             {scores}; take a smaller --context or fewer --heads"
        );
        Ok(Box::new(text))
    }
}

/// A learning rate at which the rule learns the model, where `train` is given none.
pub(crate) fn rate(model: Model, rule: Rule) -> f64 {
    let (digits, transformer) = match rule {
        Rule::Adamw | Rule::Adam => (2e-3, 1e-3),
        Rule::Sgd => (0.2, 0.2),
        Rule::Momentum => (0.05, 0.05),
        Rule::Lion => (3e-4, 3e-4),
        Rule::Adagrad => (0.02, 0.02),
        Rule::Rmsprop => (1e-3, 3e-4),
        Rule::ScheduleFree => (5e-3, 2.5e-3),
        Rule::Lars => (10.0, 10.0),
        Rule::Lamb => (0.01, 0.01),
    };
    match model {
        Model::Digits => digits,
        Model::Transformer => transformer,
    }
}

/// All of them, for `--help`.
pub(crate) fn help_on_rates() -> String {
    let mut text = String::from("Learning rates without --lr, of the digits and the transformer:");
    for rule in Rule::value_variants() {
        let [digits, transformer] =
            [Model::Digits, Model::Transformer].map(|model| rate(model, *rule));
        let _ = write!(text, "\n  {:<14}{digits:<8}{transformer}", name_of(*rule));
    }
    text
}
