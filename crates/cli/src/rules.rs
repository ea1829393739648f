//! The update rule and its hyper-parameters, as flags.

use std::sync::OnceLock;

use anyhow::{bail, ensure};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars};
use fusestep_launch::{Precision, SettingValue, StateDType};
use fusestep_planner::{NamedRule, Optimizer};
use fusestep_tensor::{DType, ParamDesc, Quoted};

use crate::options::named;
use crate::rule_flags::RuleFlags;
use crate::settings::{Settings, Subcommand};

/// The update rule, by one of its names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule(NamedRule);

impl Rule {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        self.0.rule.name()
    }

    /// The learning rate where none is given.
    pub(crate) fn default_lr(self) -> f64 {
        self.0.rule.lr()
    }
}

impl ValueEnum for Rule {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: OnceLock<Vec<Rule>> = OnceLock::new();
        ALL.get_or_init(|| NamedRule::all().into_iter().map(Rule).collect())
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()).help(self.0.says))
    }
}

/// The update rule and its hyper-parameters. A flag that the rule does not have is refused.
#[derive(Clone, Debug, Args)]
pub(crate) struct OptimizerArgs {
    /// Update rule
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: Rule,
    #[command(flatten)]
    flags: RuleFlags,
    /// lars, lamb: learning rate of parameters whose own weight decay --exclude has taken away, and
    /// of no others, also where --weight-decay is 0 [default: plain-lr, of which `train` takes for
    /// lars what suits momentum]
    #[arg(long, value_parser = named([
        ("plain-lr", Excluded::PlainLr, "The plain one"),
        ("trust-ratio", Excluded::TrustRatio, "The one scaled by the trust ratio"),
    ]))]
    pub(crate) excluded: Option<Excluded>,
}

impl OptimizerArgs {
    /// These flags, with this learning rate if none was given.
    pub(crate) fn with_default_lr(self, lr: f64) -> Self {
        Self { flags: self.flags.with_default("lr", lr), ..self }
    }

    /// The rule; its values are checked when a plan is made.
    ///
    /// # Errors
    /// A flag that the rule does not have, by name.
    pub(crate) fn rule(&self) -> anyhow::Result<Optimizer> {
        let rule = self.flags.apply(&self.optimizer.0)?;
        let excluded = self.excluded.unwrap_or(Excluded::PlainLr);
        Ok(match rule {
            Optimizer::Lars(lars) => Lars { excluded, ..lars }.into(),
            Optimizer::Lamb(lamb) => Lamb { excluded, ..lamb }.into(),
            other if self.excluded.is_none() => other,
            _ => bail!(
                "--excluded: expected --optimizer lars or lamb, found {}, which has no such setting",
                self.optimizer.name()
            ),
        })
    }

    /// Refuses flags of the rule that would do nothing, and numbers that would vanish.
    ///
    /// # Errors
    /// The first of them: of excluded parameters, of a state that the rule does not keep, or of
    /// numbers that are 0 where these parameters are updated.
    pub(crate) fn check<S: Subcommand>(
        &self,
        settings: &Settings<S>,
        params: &[ParamDesc],
    ) -> anyhow::Result<()> {
        self.require_excluded(settings.exclude())?;
        self.require_state(settings.precision().state)?;
        if params.iter().any(|param| param.dtype == DType::F64) {
            return Ok(());
        }
        let numbers = self.flags.numbers().map(|(long, number)| (format!("--{long}"), number));
        for (flag, number) in numbers.chain(settings.numbers_of_params()) {
            ensure!(
                number == 0.0 || number as f32 != 0.0,
                "{flag}: expected 0 or at least 1.4e-45, since parameters other than f64 are \
                 updated in f32, found {number:e}"
            );
        }
        Ok(())
    }

    /// Refuses flags of excluded parameters that would do nothing: a missing pattern where another
    /// flag needs one; patterns where no parameter has a decay, or a rate of its layer, that could
    /// be taken away.
    fn require_excluded(&self, exclude: &[String]) -> anyhow::Result<()> {
        let Some(pattern) = exclude.first() else {
            ensure!(
                self.excluded.is_none(),
                "--excluded: expected --exclude too, found no such flag; it is the rate of what \
                 that names"
            );
            return Ok(());
        };
        let mut rule = self.optimizer.0.rule;
        let has_rates = matches!(rule, Optimizer::Lars(_) | Optimizer::Lamb(_));
        let scales = has_rates && self.excluded != Some(Excluded::TrustRatio);
        let mut decay = self.flags.number("weight_decay");
        rule.each(&mut |setting| {
            if let ("weight_decay", SettingValue::Number(value, _)) = (setting.name, setting.value)
            {
                decay = decay.or(Some(*value));
            }
        });
        if scales || decay.is_some_and(|decay| decay != 0.0) {
            return Ok(());
        }
        ensure!(
            !has_rates,
            "--excluded trust-ratio: expected plain-lr, or a --weight-decay above 0, found 0: what \
             --exclude `{}` names would be updated like all else",
            Quoted(pattern)
        );
        bail!(
            "--exclude `{}`: expected a --weight-decay above 0, which it takes away, found 0",
            Quoted(pattern)
        )
    }

    /// Refuses a type of state with a switch of the rule that it is not for.
    fn require_state(&self, state: StateDType) -> anyhow::Result<()> {
        if state == StateDType::Compute {
            return Ok(());
        }
        let rule = self.rule()?;
        let takes = |rule: &Optimizer| {
            let precision = Precision { state, ..Precision::default() };
            rule.rule().kernel(DType::F32, precision).is_ok()
        };
        if takes(&rule) || !rule.keeps_state() {
            return Ok(());
        }
        // A switch without which the rule's state would be of this type.
        for long in self.flags.switches() {
            let without = Self { flags: self.flags.without(long), ..self.clone() };
            let is_it = without.rule().is_ok_and(|rule| takes(&rule));
            ensure!(
                !is_it,
                "--state-dtype {} and --{long}: the second keeps means that codes of 8 bits do not \
                 stand for; remove one, or give --state-dtype bf16",
                state.name()
            );
        }
        Ok(())
    }
}
