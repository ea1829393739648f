//! Which rules have which flags: one that a rule does not have is refused.

use anyhow::bail;

use super::Rule::{Adagrad, Adam, Adamw, Lamb, Lars, Lion, Momentum, Rmsprop, ScheduleFree, Sgd};
use super::{OptimizerArgs, Rule};
use crate::options::name_of;

/// Refuses flags that the rule does not have.
///
/// # Errors
/// Naming the first of them and the rules that have it.
pub(super) fn refuse(args: &OptimizerArgs) -> anyhow::Result<()> {
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
