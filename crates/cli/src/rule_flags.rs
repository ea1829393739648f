//! Settings of update rules as flags, drawn from the rules themselves.

use std::sync::OnceLock;

use anyhow::bail;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, FromArgMatches, Id};
use fusestep_launch::SettingValue;
use fusestep_planner::{NamedRule, Optimizer};

use crate::headings::RULE;
use crate::options::{self, whole};

/// Number below which a default is printed with an exponent.
const SMALL: f64 = 1e-4;

/// The group of these flags, by which others name them all.
const GROUP: &str = "RuleFlags";

/// The setting that is a flag with two names of values, where other switches are on or not there.
const DECOUPLED: &str = "decoupled";

/// Settings of rules that were given as flags, by the settings' names.
#[derive(Clone, Debug, Default)]
pub(crate) struct RuleFlags {
    given: Vec<(&'static str, Given)>,
}

/// A value that was given.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Given {
    Number(f64),
    Switch(bool),
}

/// The kind of value that a flag takes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Number,
    Count,
    Switch,
}

/// A flag of one or more rules.
#[derive(Debug)]
struct Flag {
    /// Name of the setting.
    name: &'static str,
    /// Name on the command line.
    long: &'static str,
    /// Name of the value in `--help`.
    value_name: &'static str,
    kind: Kind,
    rules: Vec<OfRule>,
}

/// A flag in one rule.
#[derive(Debug)]
struct OfRule {
    rule: &'static str,
    says: String,
    /// Number where none is given.
    default: Option<f64>,
}

/// Whether a rule of this name has a flag for a setting. `adam` and `adamw` say by their names how
/// decay enters, and `sgd` that it has no velocity.
fn has(named: &NamedRule, setting: &str) -> bool {
    !matches!(
        (named.rule.name(), setting),
        ("adam" | "adamw", DECOUPLED) | ("sgd", "momentum" | "dampening" | "nesterov")
    )
}

/// Every flag, in the order in which rules have them.
fn flags() -> &'static [Flag] {
    static FLAGS: OnceLock<Vec<Flag>> = OnceLock::new();
    FLAGS.get_or_init(|| {
        let mut flags: Vec<Flag> = Vec::new();
        for named in NamedRule::all() {
            let mut rule = named.rule;
            rule.each(&mut |setting| {
                if !has(&named, setting.name) {
                    return;
                }
                let (kind, default) = match setting.value {
                    SettingValue::Number(value, _) => (Kind::Number, Some(*value)),
                    SettingValue::Count(value) => (Kind::Count, Some(f64::from(*value))),
                    SettingValue::Switch(_) => (Kind::Switch, None),
                };
                let says = sentence(setting.says);
                let of_rule = OfRule { rule: named.rule.name(), says, default };
                match flags.iter_mut().find(|flag| flag.name == setting.name) {
                    Some(flag) => flag.rules.push(of_rule),
                    None => flags.push(Flag::new(setting.name, kind, of_rule)),
                }
            });
        }
        flags
    })
}

/// A setting's documentation without its default, which `--help` names by itself.
fn sentence(says: &str) -> String {
    let words: Vec<&str> = says.split_whitespace().collect();
    let says = words.join(" ");
    let before_default = says.find(" by default").map_or(says.as_str(), |end| {
        let before = &says[..end];
        let cut = before.rfind("; ").max(before.rfind(". "));
        &before[..cut.unwrap_or(end)]
    });
    before_default.trim_end_matches('.').to_owned()
}

impl Flag {
    fn new(name: &'static str, kind: Kind, first: OfRule) -> Self {
        let long = if name == DECOUPLED { "decay".to_owned() } else { name.replace('_', "-") };
        let value_name = name.to_uppercase();
        // Once for a program: clap keeps names as long as it runs.
        let kept = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
        Self { name, long: kept(long), value_name: kept(value_name), kind, rules: vec![first] }
    }

    /// The sentences of all rules, and their defaults.
    fn help(&self) -> String {
        let mut told: Vec<(Vec<&str>, &str)> = Vec::new();
        for of in &self.rules {
            match told.iter_mut().find(|(_, says)| *says == of.says) {
                Some((rules, _)) => rules.push(of.rule),
                None => told.push((vec![of.rule], &of.says)),
            }
        }
        let told: Vec<String> =
            told.into_iter().map(|(rules, says)| format!("{}: {says}", rules.join(", "))).collect();
        let mut help = told.join("; ");
        let mut defaults: Vec<(Vec<&str>, f64)> = Vec::new();
        for of in &self.rules {
            let Some(default) = of.default else { continue };
            match defaults.iter_mut().find(|(_, value)| *value == default) {
                Some((rules, _)) => rules.push(of.rule),
                None => defaults.push((vec![of.rule], default)),
            }
        }
        // The default of most rules stands alone.
        defaults.sort_by_key(|(rules, _)| std::cmp::Reverse(rules.len()));
        let texts = defaults.iter().enumerate().map(|(place, (rules, value))| match place {
            0 => number(*value),
            _ => format!("{} {}", rules.join(" and "), number(*value)),
        });
        let texts: Vec<String> = texts.collect();
        if !texts.is_empty() {
            help += &format!(" [default: {}]", texts.join("; "));
        }
        help
    }

    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.long).help(self.help()).help_heading(RULE);
        match self.kind {
            Kind::Number => arg
                .value_name(self.value_name)
                .value_parser(options::number)
                .allow_hyphen_values(true),
            Kind::Count => {
                arg.value_name(self.value_name).value_parser(whole::<u32, 0, { u32::MAX as u64 }>)
            }
            Kind::Switch if self.name == DECOUPLED => {
                arg.value_name("DECAY").value_parser(PossibleValuesParser::new(["l2", DECOUPLED]))
            }
            Kind::Switch => arg.action(ArgAction::SetTrue),
        }
    }

    fn given(&self, matches: &ArgMatches) -> Option<Given> {
        match self.kind {
            Kind::Number => matches.get_one::<f64>(self.name).copied().map(Given::Number),
            Kind::Count => {
                matches.get_one::<u32>(self.name).map(|count| Given::Number(f64::from(*count)))
            }
            Kind::Switch if self.name == DECOUPLED => {
                let kind = matches.get_one::<String>(self.name);
                kind.map(|kind| Given::Switch(kind == DECOUPLED))
            }
            Kind::Switch => matches.get_flag(self.name).then_some(Given::Switch(true)),
        }
    }
}

fn number(value: f64) -> String {
    if value != 0.0 && value.abs() < SMALL { format!("{value:e}") } else { value.to_string() }
}

/// The name on the command line of a rule's setting; `None` if no rule has it.
pub(crate) fn long_of(setting: &str) -> Option<&'static str> {
    flags().iter().find(|flag| flag.name == setting).map(|flag| flag.long)
}

/// Whether a rule's setting is a flag without a value.
pub(crate) fn is_switch(setting: &str) -> bool {
    let of = |flag: &&Flag| flag.name == setting && flag.kind == Kind::Switch;
    flags().iter().any(|flag| of(&flag) && flag.name != DECOUPLED)
}

/// Hides flags that the rule of this name has not, and says of the others what they are to it.
pub(crate) fn of_rule(command: Command, rule: &str) -> Command {
    flags().iter().fold(command, |command, flag| {
        let own = flag.rules.iter().find(|of| of.rule == rule);
        command.mut_arg(flag.name, |arg| match own {
            Some(own) => {
                let default = own.default.map(|value| format!(" [default: {}]", number(value)));
                arg.help(format!("{}{}", own.says, default.unwrap_or_default()))
            }
            None => arg.hide(true),
        })
    })
}

impl Args for RuleFlags {
    fn group_id() -> Option<Id> {
        Some(Id::from(GROUP))
    }

    fn augment_args(command: Command) -> Command {
        let names = flags().iter().map(|flag| flag.name);
        let group = ArgGroup::new(GROUP).multiple(true).args(names);
        command.group(group).args(flags().iter().map(Flag::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for RuleFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = flags().iter().filter_map(|flag| Some((flag.name, flag.given(matches)?)));
        Ok(Self { given: given.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl RuleFlags {
    /// The number given for a setting.
    pub(crate) fn number(&self, setting: &str) -> Option<f64> {
        match self.get(setting)? {
            Given::Number(number) => Some(number),
            Given::Switch(_) => None,
        }
    }

    /// The numbers given, each with its flag.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.given.iter().filter_map(|(name, given)| match given {
            Given::Number(number) => Some((long_of(name)?, *number)),
            Given::Switch(_) => None,
        })
    }

    /// The flags of switches that were given.
    pub(crate) fn switches(&self) -> impl Iterator<Item = &'static str> {
        let is_switch = |given: &&(&str, Given)| matches!(given.1, Given::Switch(true));
        self.given.iter().filter(is_switch).filter_map(|(name, _)| long_of(name))
    }

    /// These flags without one.
    pub(crate) fn without(&self, long: &str) -> Self {
        let rest = self.given.iter().filter(|(name, _)| long_of(name) != Some(long));
        Self { given: rest.copied().collect() }
    }

    /// These flags, with this number if none was given.
    pub(crate) fn with_default(mut self, setting: &'static str, number: f64) -> Self {
        if self.get(setting).is_none() {
            self.given.push((setting, Given::Number(number)));
        }
        self
    }

    fn get(&self, setting: &str) -> Option<Given> {
        self.given.iter().find(|(name, _)| *name == setting).map(|(_, given)| *given)
    }

    /// The rule of this name with the settings given.
    ///
    /// # Errors
    /// The first flag that the rule does not have, and the rules that have it; a kind of decay
    /// without one.
    pub(crate) fn apply(&self, named: &NamedRule) -> anyhow::Result<Optimizer> {
        for (setting, _) in &self.given {
            refuse_foreign(named, setting)?;
        }
        let decay = self.number("weight_decay");
        if self.get(DECOUPLED).is_some() && decay.is_none_or(|decay| decay == 0.0) {
            bail!(
                "--decay: expected a --weight-decay above 0 too, found {}; it says how that enters",
                decay.map_or("none".to_owned(), |decay| decay.to_string())
            );
        }
        let mut rule = named.rule;
        rule.each(&mut |setting| match (setting.value, self.get(setting.name)) {
            (SettingValue::Number(value, _), Some(Given::Number(given))) => *value = given,
            // The parser has seen that it is one.
            (SettingValue::Count(value), Some(Given::Number(given))) => *value = given as u32,
            (SettingValue::Switch(switch), Some(Given::Switch(on))) => switch.turn(on),
            _ => {}
        });
        Ok(rule)
    }
}

/// Refuses a flag that the rule does not have.
fn refuse_foreign(named: &NamedRule, setting: &str) -> anyhow::Result<()> {
    let found = named.rule.name();
    let Some(flag) = flags().iter().find(|flag| flag.name == setting) else {
        return Ok(());
    };
    let rules: Vec<&str> = flag.rules.iter().map(|of| of.rule).collect();
    if rules.contains(&found) {
        return Ok(());
    }
    bail!(
        "--{}: expected --optimizer {}, found {found}, which has no such setting",
        flag.long,
        rules.join(" or ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_the_documentation_without_the_default() {
        for (says, expected) in [
            (
                " α: decay of the mean square, in [0, 1); 0.99 by default.",
                "α: decay of the mean square, in [0, 1)",
            ),
            (" μ, in [0, 1). 0 by\n default, which keeps none.", "μ, in [0, 1)"),
            (" Direction of the step.", "Direction of the step"),
        ] {
            assert_eq!(sentence(says), expected);
        }
    }

    #[test]
    fn every_setting_of_every_rule_reaches_it_by_its_flag() {
        for named in NamedRule::all() {
            let mut count = 0;
            let mut rule = named.rule;
            rule.each(&mut |setting| {
                if !has(&named, setting.name) {
                    return;
                }
                count += 1;
                let given = match setting.value {
                    SettingValue::Number(..) => Given::Number(0.625),
                    SettingValue::Count(_) => Given::Number(3.0),
                    SettingValue::Switch(switch) => Given::Switch(!switch.is_on()),
                };
                let flags = RuleFlags { given: vec![("weight_decay", Given::Number(0.5))] };
                let flags = RuleFlags {
                    given: [(setting.name, given)].into_iter().chain(flags.given).collect(),
                };
                let found = flags.apply(&named).unwrap();
                let plain = RuleFlags::default().with_default("weight_decay", 0.5).apply(&named);
                assert_ne!(found, plain.unwrap(), "{}: {}", named.rule.name(), setting.name);
            });
            assert!(count >= 3, "{named:?}");
        }
    }
}
