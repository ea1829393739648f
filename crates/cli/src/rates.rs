//! The learning rates of `train` where none is given: each model has its own for each rule.

use std::fmt::Write as _;

use clap::ValueEnum;

use crate::options::name_of;
use crate::rules::Rule;
use crate::tasks::Model;

/// A learning rate at which the rule learns the model.
pub(crate) fn rate(model: Model, rule: Rule) -> f64 {
    match model {
        Model::Digits => of_digits(rule),
        Model::Transformer => of_transformer(rule),
    }
}

fn of_digits(rule: Rule) -> f64 {
    match rule {
        Rule::Adamw | Rule::Adam => 2e-3,
        Rule::Sgd => 0.2,
        Rule::Momentum => 0.05,
        Rule::Lion => 3e-4,
        Rule::Adagrad => 0.02,
        Rule::Rmsprop => 1e-3,
        Rule::ScheduleFree => 5e-3,
        Rule::Lars => 10.0,
        Rule::Lamb => 0.01,
    }
}

/// Those with which it learns faster than with the digits', which it takes for all other rules.
fn of_transformer(rule: Rule) -> f64 {
    match rule {
        Rule::Adamw | Rule::Adam => 1e-3,
        Rule::Rmsprop => 3e-4,
        Rule::ScheduleFree => 2.5e-3,
        Rule::Sgd | Rule::Momentum | Rule::Lion | Rule::Adagrad | Rule::Lars | Rule::Lamb => {
            of_digits(rule)
        }
    }
}

/// All of them, for `--help`.
pub(crate) fn help() -> String {
    let mut text = String::from("Learning rates without --lr, of the digits and the transformer:");
    for rule in Rule::value_variants() {
        let [digits, transformer] =
            [Model::Digits, Model::Transformer].map(|model| rate(model, *rule));
        let _ = write!(text, "\n  {:<14}{digits:<8}{transformer}", name_of(*rule));
    }
    text
}
