//! The update rule and its hyper-parameters, as flags.

use anyhow::bail;
use clap::{Args, ValueEnum};
use fusestep_adagrad::Adagrad;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::{Nesterov, Sgd};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars};
use fusestep_launch::{Objective, WeightDecay};
use fusestep_lion::Lion;
use fusestep_planner::{Optimizer, Planner, Schedule};
use fusestep_rmsprop::{Centering, RmsProp};
use fusestep_schedule_free::ScheduleFree;
use fusestep_tensor::ParamDesc;

use crate::options::{name_of, named};
use crate::output::warn;
use crate::ranks::whole;

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
    /// Steps scaled by a moving mean of squared gradients
    Rmsprop,
    /// AdamW whose average takes the place of a schedule
    ScheduleFree,
    /// Momentum with a rate for each layer: LARS
    Lars,
    /// Adam with a rate for each layer: LAMB
    Lamb,
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
#[derive(Clone, Debug, Args)]
pub(crate) struct OptimizerArgs {
    /// Update rule
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: Rule,
    /// Learning rate per step, at least 0 [default: 1e-3; lion 1e-4, adagrad and rmsprop 1e-2;
    /// `train` has those listed at the end]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) lr: Option<f64>,
    /// adam, lamb, lion: decay of the first moment, in [0, 1); schedule-free: share of the average
    /// in the point where gradients are taken, in (0, 1) [default: 0.9]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) beta1: Option<f64>,
    /// adam, lamb, schedule-free: decay of the second moment; lion: of the moment; in [0, 1)
    /// [default: 0.999; lion 0.99]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) beta2: Option<f64>,
    /// adam, adagrad, rmsprop, lamb, schedule-free: added to the root; lars: to the trust ratio's
    /// denominator; at least 0 [default: 1e-8; adagrad 1e-10, lamb 1e-6, lars 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) eps: Option<f64>,
    /// Weight decay, at least 0 [default: 0.01 for adamw and lamb, 0.0005 for lars, else 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) weight_decay: Option<f64>,
    /// sgd, momentum: how weight decay enters [default: l2]
    #[arg(long, value_enum)]
    pub(crate) decay: Option<Decay>,
    /// momentum, lars, rmsprop: what is left of the velocity after a step, in [0, 1) [default: 0.9;
    /// rmsprop 0, which keeps none]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) momentum: Option<f64>,
    /// momentum: share of the gradient that does not reach the velocity, in [0, 1) [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) dampening: Option<f64>,
    /// momentum: step along gradient and velocity
    #[arg(long)]
    pub(crate) nesterov: bool,
    /// sgd, momentum, lars: factor on the gradient, above 0 [default: 1]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) rescale: Option<f64>,
    /// adagrad: step t uses lr / (1 + (t − 1)·lr-decay) [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) lr_decay: Option<f64>,
    /// adagrad: what the sum of squared gradients starts from, at least 0 [default: 0]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) initial_sum: Option<f64>,
    /// schedule-free: steps over which the learning rate rises [default: 0]
    #[arg(long, value_parser = whole::<u32, 0, { u32::MAX as u64 }>)]
    pub(crate) warmup_steps: Option<u32>,
    /// rmsprop: decay of the mean of squared gradients, in [0, 1) [default: 0.99]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) alpha: Option<f64>,
    /// rmsprop: divide by the variance's root, not by the mean square's
    #[arg(long)]
    pub(crate) centered: bool,
    /// lars: factor on the trust ratio, at least 0 [default: 0.001]
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) trust_coefficient: Option<f64>,
    /// No weight decay for parameters whose name contains this; may be repeated
    #[arg(long, value_name = "SUBSTRING")]
    pub(crate) exclude: Vec<String>,
    /// lars, lamb: learning rate of parameters whose own weight decay --exclude has taken away, and
    /// of no others, also where --weight-decay is 0 [default: plain-lr]
    #[arg(long, value_parser = named([
        ("plain-lr", Excluded::PlainLr, "The plain one"),
        ("trust-ratio", Excluded::TrustRatio, "The one scaled by the trust ratio"),
    ]))]
    pub(crate) excluded: Option<Excluded>,
    /// adam: scale the step by the largest second moment so far
    #[arg(long)]
    pub(crate) amsgrad: bool,
    // Not as a doc comment, which would take the brackets for links.
    #[arg(
        long,
        help = "What multiplies the learning rate at every update: warmup:STEPS, \
                cosine:STEPS[:FLOOR], polynomial:STEPS:POWER[:FLOOR], linear:STEPS:FROM:TO, \
                constant[:STEPS[:FACTOR]], step:EVERY:GAMMA[:STEPS]; joined by commas one follows \
                on the other, as in warmup:100,cosine:900:0.1"
    )]
    pub(crate) schedule: Option<Schedule>,
    /// Step along the gradient instead of against it; lars, lamb and schedule-free have no such
    /// setting
    #[arg(long)]
    pub(crate) maximize: bool,
}

/// A rule's defaults but for the flags that are given and for what follows from other flags.
macro_rules! given {
    ($args:ident, $rule:ident { $($flag:ident),* } with $($field:ident),*) => {{
        let default = $rule::default();
        $rule { $($flag: $args.$flag.unwrap_or(default.$flag),)* $($field),* }.into()
    }};
}

impl OptimizerArgs {
    /// These flags, with a learning rate if none was given.
    pub(crate) fn with_default_lr(self, lr: f64) -> Self {
        Self { lr: self.lr.or(Some(lr)), ..self }
    }

    /// The planner with the schedule asked for.
    pub(crate) fn scheduled(&self, planner: Planner) -> Planner {
        match &self.schedule {
            Some(schedule) => planner.schedule(schedule.clone()),
            None => planner,
        }
    }

    /// The rule; its values are checked when a plan is made.
    ///
    /// # Errors
    /// A flag that the rule does not have, by name.
    pub(crate) fn rule(&self) -> anyhow::Result<Optimizer> {
        refuse_foreign(self)?;
        let objective = if self.maximize { Objective::Maximize } else { Objective::Minimize };
        let excluded = self.excluded.unwrap_or(Excluded::PlainLr);
        Ok(match self.optimizer {
            Rule::Adamw | Rule::Adam => {
                let weight_decay = match self.optimizer {
                    Rule::Adam => WeightDecay::L2(self.weight_decay.unwrap_or(0.0)),
                    _ => WeightDecay::Decoupled(self.weight_decay.unwrap_or(0.01)),
                };
                let second_moment =
                    if self.amsgrad { SecondMoment::Largest } else { SecondMoment::Running };
                given!(self, Adam { lr, beta1, beta2, eps }
                    with weight_decay, second_moment, objective)
            }
            Rule::Sgd | Rule::Momentum => {
                let default = match self.optimizer {
                    Rule::Momentum => Sgd::with_momentum(),
                    _ => Sgd::default(),
                };
                let momentum = self.momentum.unwrap_or(default.momentum);
                let lambda = self.weight_decay.unwrap_or(0.0);
                let weight_decay = match self.decay {
                    Some(Decay::Decoupled) => WeightDecay::Decoupled(lambda),
                    Some(Decay::L2) | None => WeightDecay::L2(lambda),
                };
                let nesterov = if self.nesterov { Nesterov::Nesterov } else { Nesterov::Plain };
                given!(self, Sgd { lr, dampening, rescale }
                    with momentum, nesterov, weight_decay, objective)
            }
            Rule::Lion => given!(self, Lion { lr, beta1, beta2, weight_decay } with objective),
            Rule::Adagrad => {
                given!(self, Adagrad { lr, lr_decay, initial_sum, eps, weight_decay }
                    with objective)
            }
            Rule::Rmsprop => {
                let centering =
                    if self.centered { Centering::Centered } else { Centering::MeanSquare };
                given!(self, RmsProp { lr, alpha, eps, momentum, weight_decay }
                    with centering, objective)
            }
            Rule::ScheduleFree => {
                given!(self, ScheduleFree { lr, beta1, beta2, eps, weight_decay, warmup_steps }
                    with)
            }
            Rule::Lars => {
                given!(self, Lars { lr, momentum, trust_coefficient, weight_decay, eps, rescale }
                    with excluded)
            }
            Rule::Lamb => given!(self, Lamb { lr, beta1, beta2, eps, weight_decay } with excluded),
        })
    }

    /// Takes weight decay off the parameters that --exclude names; a pattern that names none is
    /// warned of.
    pub(crate) fn exclude(&self, params: &mut [ParamDesc]) {
        for pattern in &self.exclude {
            let mut matches = 0;
            for param in params.iter_mut() {
                if param.name.contains(pattern.as_str()) {
                    param.weight_decay = Some(0.0);
                    matches += 1;
                }
            }
            if matches == 0 {
                warn(&format!(
                    "warning: --exclude `{pattern}`: expected a part of a parameter's name, found \
                     it in none of {}",
                    params.len()
                ));
            }
        }
    }
}

/// Refuses flags that the rule does not have.
///
/// # Errors
/// Naming the first of them and the rules that have it.
fn refuse_foreign(args: &OptimizerArgs) -> anyhow::Result<()> {
    use Rule::{Adagrad, Adam, Adamw, Lamb, Lars, Lion, Momentum, Rmsprop, ScheduleFree, Sgd};

    let betas: &[Rule] = &[Adamw, Adam, Lamb, Lion, ScheduleFree];
    let eps: &[Rule] = &[Adamw, Adam, Adagrad, Rmsprop, ScheduleFree, Lamb, Lars];
    let velocity: &[Rule] = &[Momentum, Lars, Rmsprop];
    let objective: &[Rule] = &[Adamw, Adam, Sgd, Momentum, Lion, Adagrad, Rmsprop];
    let flags = [
        ("--beta1", args.beta1.is_some(), betas),
        ("--beta2", args.beta2.is_some(), betas),
        ("--warmup-steps", args.warmup_steps.is_some(), &[ScheduleFree]),
        ("--eps", args.eps.is_some(), eps),
        ("--amsgrad", args.amsgrad, &[Adamw, Adam]),
        ("--decay", args.decay.is_some(), &[Sgd, Momentum]),
        ("--momentum", args.momentum.is_some(), velocity),
        ("--alpha", args.alpha.is_some(), &[Rmsprop]),
        ("--centered", args.centered, &[Rmsprop]),
        ("--dampening", args.dampening.is_some(), &[Momentum]),
        ("--nesterov", args.nesterov, &[Momentum]),
        ("--rescale", args.rescale.is_some(), &[Sgd, Momentum, Lars]),
        ("--maximize", args.maximize, objective),
        ("--trust-coefficient", args.trust_coefficient.is_some(), &[Lars]),
        ("--excluded", args.excluded.is_some(), &[Lars, Lamb]),
        ("--lr-decay", args.lr_decay.is_some(), &[Adagrad]),
        ("--initial-sum", args.initial_sum.is_some(), &[Adagrad]),
    ];
    for (flag, given, rules) in flags {
        if given && !rules.contains(&args.optimizer) {
            let names: Vec<String> = rules.iter().copied().map(name_of).collect();
            bail!(
                "{flag}: expected --optimizer {}, found {}, which has no such setting",
                names.join(" or "),
                name_of(args.optimizer)
            );
        }
    }
    Ok(())
}
