//! Hyper-parameters under their names in candle, and the rules they stand for.

use std::fmt;

use candle_nn::ParamsAdamW;
use fusestep_fused_adam::Adam;
use fusestep_launch::WeightDecay;
use fusestep_planner::Optimizer as Rule;

/// Hyper-parameters of an update rule, as [`crate::Fused`] takes them.
///
/// A [`Rule`] implements this trait itself, for programs that choose the rule as they run.
pub trait Params: Clone + fmt::Debug {
    /// The rule.
    fn rule(&self) -> Rule;

    /// Sets the learning rate.
    fn set_lr(&mut self, lr: f64);

    /// The learning rate.
    fn lr(&self) -> f64 {
        self.rule().lr()
    }
}

impl Params for ParamsAdamW {
    fn rule(&self) -> Rule {
        Rule::Adam(Adam {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: WeightDecay::Decoupled(self.weight_decay),
            ..Adam::default()
        })
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }
}

impl Params for Rule {
    fn rule(&self) -> Rule {
        *self
    }

    fn set_lr(&mut self, lr: f64) {
        *self = self.with_lr(lr);
    }
}
