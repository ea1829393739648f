//! Tasks of `train`: the model of the digits or a transformer, and the learning rates at which
//! rules learn them.

use std::fmt::Write as _;
use std::num::NonZeroUsize;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use fusestep_models::{Digits, Task, Text, Transformer};
use fusestep_tensor::{ParamDesc, Trust};

use crate::options::{name_of, whole};
use crate::rules::{OptimizerArgs, Rule};

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

/// Flags of the model that is trained.
#[derive(Debug, Args)]
pub(crate) struct TaskArgs {
    /// Model that is trained, and its data
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
    /// The model and its data; `seed` decides which samples are held back, where they are drawn.
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
        let model = self.transformer();
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

    fn transformer(&self) -> Transformer {
        let or = |size: Option<NonZeroUsize>, default| size.map_or(default, NonZeroUsize::get);
        let default = Transformer::default();
        Transformer {
            layers: or(self.layers, default.layers),
            width: or(self.width, default.width),
            heads: or(self.heads, default.heads),
            context: or(self.context, default.context),
            ..default
        }
    }

    /// The model and its sizes, by the names of their flags, as texts.
    pub(crate) fn texts(&self) -> Vec<(&'static str, String)> {
        let mut texts = vec![("model", name_of(self.model))];
        if self.model == Model::Transformer {
            let Transformer { layers, width, heads, context, .. } = self.transformer();
            let sizes =
                [("layers", layers), ("width", width), ("heads", heads), ("context", context)];
            texts.extend(sizes.map(|(flag, size)| (flag, size.to_string())));
        }
        texts
    }
}

/// A learning rate at which the rule learns the model, for `train` without --lr.
pub(crate) fn rate(model: Model, rule: Rule) -> f64 {
    let (digits, transformer) = match rule.name() {
        "adamw" | "adam" => (2e-3, 1e-3),
        "sgd" => (0.2, 0.2),
        "momentum" => (0.05, 0.05),
        "lion" => (3e-4, 3e-4),
        "adagrad" => (0.02, 0.02),
        "rmsprop" => (1e-3, 3e-4),
        "schedule-free" => (5e-3, 2.5e-3),
        "lars" => (10.0, 10.0),
        "lamb" => (0.01, 0.01),
        _ => (rule.default_lr(), rule.default_lr()),
    };
    match model {
        Model::Digits => digits,
        Model::Transformer => transformer,
    }
}

/// Gives parameters that LARS does not scale a share of the rate, with which momentum learns the
/// model. LARS's own rate is meant for trust ratios far below 1. With --excluded the rate stays as
/// it is.
pub(crate) fn plain_rates(optimizer: &OptimizerArgs, model: Model, params: &mut [ParamDesc]) {
    if optimizer.optimizer.name() != "lars" || optimizer.excluded.is_some() {
        return;
    }
    let of_momentum = Rule::value_variants().iter().find(|rule| rule.name() == "momentum");
    let momentum = of_momentum.expect("SGD with a velocity has this name");
    let share = rate(model, *momentum) / rate(model, optimizer.optimizer);
    let is_plain = |param: &&mut ParamDesc| {
        param.weight_decay == Some(0.0) || param.trust == Some(Trust::Plain)
    };
    for param in params.iter_mut().filter(is_plain) {
        param.lr_scale *= share;
    }
}

/// Learning rates of one rule or of all, for `--help`.
pub(crate) fn help_on_rates(of: Option<Rule>) -> String {
    let mut text = String::from("Learning rates without --lr, of the digits and the transformer:");
    for rule in Rule::value_variants().iter().filter(|rule| of.is_none_or(|of| of == **rule)) {
        let [digits, transformer] =
            [Model::Digits, Model::Transformer].map(|model| rate(model, *rule));
        let _ = write!(text, "\n  {:<14}{digits:<8}{transformer}", rule.name());
    }
    text
}
