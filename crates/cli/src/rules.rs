//! The update rule and its hyper-parameters, as flags.

use anyhow::bail;
use clap::{Args, ValueEnum};
use fusestep_adagrad::Adagrad;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::{Nesterov, Sgd};
use fusestep_launch::{Objective, WeightDecay};
use fusestep_lion::Lion;
use fusestep_planner::Optimizer;

/// The update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam with L2 regularisation
    Adam,
    /// Stochastic gradient descent, which keeps no state
    Sgd,
    /// SGD with a velocity
    Momentum,
    /// The sign of a moving mean, with decoupled weight decay
    Lion,
    /// Steps scaled by the sum of squared gradients
    Adagrad,
}

/// How weight decay enters the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Decay {
    /// Added to the gradient
    L2,
    /// Applied to the parameter
    Decoupled,
}

/// The update rule and its hyper-parameters. A flag that the rule does not have is refused.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OptimizerArgs {
    /// Update rule
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: Rule,
    /// Learning rate per step, at least 0 [default: 1e-3; lion 1e-4, adagrad 1e-2; `train` has its own]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) lr: Option<f64>,
    /// adam, lion: decay of the first moment, in [0, 1) [default: 0.9]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) beta1: Option<f64>,
    /// adam: decay of the second moment; lion: of the moment; in [0, 1) [default: 0.999; lion 0.99]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) beta2: Option<f64>,
    /// adam, adagrad: added to the root, at least 0 [default: 1e-8; adagrad 1e-10]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,
    /// Weight decay, at least 0 [default: 0.01 for adamw, else 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) weight_decay: Option<f64>,
    /// sgd, momentum: how weight decay enters [default: l2]
    #[arg(long, value_enum)]
    pub(crate) decay: Option<Decay>,
    /// momentum: what is left of the velocity after a step, in [0, 1) [default: 0.9]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) momentum: Option<f64>,
    /// momentum: share of the gradient that does not reach the velocity, in [0, 1) [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) dampening: Option<f64>,
    /// momentum: step along gradient and velocity
    #[arg(long)]
    pub(crate) nesterov: bool,
    /// sgd, momentum: factor on the gradient, above 0 [default: 1]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) rescale: Option<f64>,
    /// adagrad: step t uses lr / (1 + (t − 1)·lr-decay) [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) lr_decay: Option<f64>,
    /// adagrad: what the sum of squared gradients starts from, at least 0 [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) initial_sum: Option<f64>,
    /// adam: scale the step by the largest second moment so far
    #[arg(long)]
    pub(crate) amsgrad: bool,
    /// Step along the gradient instead of against it
    #[arg(long)]
    pub(crate) maximize: bool,
}

impl Rule {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Rule::Adamw => "adamw",
            Rule::Adam => "adam",
            Rule::Sgd => "sgd",
            Rule::Momentum => "momentum",
            Rule::Lion => "lion",
            Rule::Adagrad => "adagrad",
        }
    }
}

impl OptimizerArgs {
    /// The same flags with a learning rate if none was given.
    pub(crate) fn with_default_lr(self, lr: f64) -> Self {
        Self {
            lr: self.lr.or(Some(lr)),
            ..self
        }
    }

    /// The rule; its values are checked when a plan is made.
    ///
    /// # Errors
    /// A flag that the rule does not have, by name.
    pub(crate) fn rule(&self) -> anyhow::Result<Optimizer> {
        self.refuse_foreign_flags()?;
        Ok(match self.optimizer {
            Rule::Adamw | Rule::Adam => self.adam().into(),
            Rule::Sgd | Rule::Momentum => self.sgd().into(),
            Rule::Lion => self.lion().into(),
            Rule::Adagrad => self.adagrad().into(),
        })
    }

    fn refuse_foreign_flags(&self) -> anyhow::Result<()> {
        use Rule::{Adagrad, Adam, Adamw, Lion, Momentum, Sgd};
        let flags: [(&str, bool, &[Rule]); 11] = [
            ("--beta1", self.beta1.is_some(), &[Adamw, Adam, Lion]),
            ("--beta2", self.beta2.is_some(), &[Adamw, Adam, Lion]),
            ("--eps", self.eps.is_some(), &[Adamw, Adam, Adagrad]),
            ("--amsgrad", self.amsgrad, &[Adamw, Adam]),
            ("--decay", self.decay.is_some(), &[Sgd, Momentum]),
            ("--momentum", self.momentum.is_some(), &[Momentum]),
            ("--dampening", self.dampening.is_some(), &[Momentum]),
            ("--nesterov", self.nesterov, &[Momentum]),
            ("--rescale", self.rescale.is_some(), &[Sgd, Momentum]),
            ("--lr-decay", self.lr_decay.is_some(), &[Adagrad]),
            ("--initial-sum", self.initial_sum.is_some(), &[Adagrad]),
        ];
        for (flag, given, rules) in flags {
            if given && !rules.contains(&self.optimizer) {
                let names: Vec<&str> = rules.iter().map(|rule| rule.name()).collect();
                bail!(
                    "{flag}: expected --optimizer {}, found {}, which has no such setting",
                    names.join(" or "),
                    self.optimizer.name()
                );
            }
        }
        Ok(())
    }

    fn objective(&self) -> Objective {
        match self.maximize {
            true => Objective::Maximize,
            false => Objective::Minimize,
        }
    }

    fn adam(&self) -> Adam {
        let default = Adam::default();
        Adam {
            lr: self.lr.unwrap_or(default.lr),
            beta1: self.beta1.unwrap_or(default.beta1),
            beta2: self.beta2.unwrap_or(default.beta2),
            eps: self.eps.unwrap_or(default.eps),
            weight_decay: match self.optimizer {
                Rule::Adam => WeightDecay::L2(self.weight_decay.unwrap_or(0.0)),
                _ => WeightDecay::Decoupled(self.weight_decay.unwrap_or(0.01)),
            },
            second_moment: match self.amsgrad {
                true => SecondMoment::Largest,
                false => SecondMoment::Running,
            },
            objective: self.objective(),
        }
    }

    fn sgd(&self) -> Sgd {
        let default = match self.optimizer {
            Rule::Momentum => Sgd::with_momentum(),
            _ => Sgd::default(),
        };
        let lambda = self.weight_decay.unwrap_or(0.0);
        Sgd {
            lr: self.lr.unwrap_or(default.lr),
            momentum: self.momentum.unwrap_or(default.momentum),
            dampening: self.dampening.unwrap_or(default.dampening),
            nesterov: match self.nesterov {
                true => Nesterov::Nesterov,
                false => Nesterov::Plain,
            },
            weight_decay: match self.decay {
                Some(Decay::Decoupled) => WeightDecay::Decoupled(lambda),
                Some(Decay::L2) | None => WeightDecay::L2(lambda),
            },
            rescale: self.rescale.unwrap_or(default.rescale),
            objective: self.objective(),
        }
    }

    fn lion(&self) -> Lion {
        let default = Lion::default();
        Lion {
            lr: self.lr.unwrap_or(default.lr),
            beta1: self.beta1.unwrap_or(default.beta1),
            beta2: self.beta2.unwrap_or(default.beta2),
            weight_decay: self.weight_decay.unwrap_or(default.weight_decay),
            objective: self.objective(),
        }
    }

    fn adagrad(&self) -> Adagrad {
        let default = Adagrad::default();
        Adagrad {
            lr: self.lr.unwrap_or(default.lr),
            lr_decay: self.lr_decay.unwrap_or(default.lr_decay),
            initial_sum: self.initial_sum.unwrap_or(default.initial_sum),
            eps: self.eps.unwrap_or(default.eps),
            weight_decay: self.weight_decay.unwrap_or(default.weight_decay),
            objective: self.objective(),
        }
    }
}
