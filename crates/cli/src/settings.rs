//! Settings of a step as flags: names, values and sentences are those of the table of
//! [`StepOptions`].

mod idle;

use std::collections::HashSet;
use std::marker::PhantomData;

use clap::builder::{PossibleValue, PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, FromArgMatches, Id};
use fusestep::{OptionError, Overlap, PrecisionOf, Row, Section, StepOptions, Visit, overlaps};
use fusestep_launch::{LaunchLimits, Master, Precision, Rounding, StateDType};
use fusestep_planner::Optimizer;
use fusestep_tensor::{DType, ParamDesc, Quoted};

use crate::output::note;
use crate::planning::{flag_of, refused};

/// The group of these flags, for flags that none of them goes with.
pub(crate) const GROUP: &str = "Settings";

/// Flags of earlier versions: flag, its setting, and the value it stands for; without a value the
/// flag is another name.
const EARLIER: [(&str, &str, Option<&str>); 7] = [
    ("apart", "separate", None),
    ("gradient-merge", "accumulate", None),
    ("rings", "comm_streams", None),
    ("table", "tables", None),
    ("reduce-each", "reduced", Some("per_micro_step")),
    ("merge-reduce-each", "reduced", Some("per_micro_step")),
    ("adaptive", "local_sgd_interval", Some("adaptive")),
];

/// Name of the number of micro-steps of an update.
pub(crate) const MICRO_STEPS: &str = "accumulate";

/// Micro-steps of an update, or of each of its lanes.
pub(crate) fn micro_steps(options: &StepOptions) -> u32 {
    options.accumulate
}

/// The setting that an earlier flag, which is no other name of it, stands for.
pub(crate) fn stands_for(flag: &str) -> Option<&'static str> {
    let mut earlier = EARLIER.iter().filter(|(.., value)| value.is_some());
    earlier.find(|(name, ..)| *name == flag).map(|(_, setting, _)| *setting)
}

/// Whether the table has a setting of this name.
pub(crate) fn is_setting(name: &str) -> bool {
    let mut known = Known { name, is_there: false };
    // The defaults are in range.
    let _ = StepOptions::default().each(&mut known);
    known.is_there
}

/// Looks for a setting's name.
struct Known<'a> {
    name: &'a str,
    is_there: bool,
}

impl Visit for Known<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        self.is_there |= row.name == self.name;
        Ok(())
    }
}

/// A subcommand, by the settings that have an effect in it.
pub(crate) trait Subcommand {
    /// Whether the subcommand has a setting of this name and part of the table.
    fn has(name: &str, section: Section) -> bool;
}

/// Settings of one process, whose every gradient is there at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step;

impl Subcommand for Step {
    fn has(name: &str, section: Section) -> bool {
        use Section::{Gradients, Launches, Parameters, Precision, Rate};

        let sections = [Parameters, Rate, Precision, Gradients, Launches];
        Plan::has(name, section) && sections.contains(&section)
    }
}

/// Settings of steps that are timed: whole steps of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bench;

impl Subcommand for Bench {
    fn has(name: &str, section: Section) -> bool {
        // The parts of a step are calls of all ranks.
        let of_ranks = [Section::Shares, Section::Calls].contains(&section);
        Step::has(name, section) || (of_ranks && name != "shard_group")
    }
}

/// Settings of steps whose bits are compared: those of all ranks, but for the stages, which are
/// tried one after the other, and for sums of one micro-step, which go without lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verify;

impl Subcommand for Verify {
    fn has(name: &str, section: Section) -> bool {
        let of_sums = [Section::MicroSteps, Section::Backward].contains(&section);
        (Bench::has(name, section) || of_sums) && !["zero", "reduced"].contains(&name)
    }
}

/// Settings that a plan without values depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan;

impl Subcommand for Plan {
    fn has(name: &str, section: Section) -> bool {
        // Threads are those of all ranks together here, and so a flag of their own. Ranks tell each
        // other the shapes of their slices, which a file of one rank has not.
        name != "threads" && section != Section::Start
    }
}

/// Settings of whole runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Train;

impl Subcommand for Train {
    fn has(name: &str, section: Section) -> bool {
        Plan::has(name, section) || name == "initial"
    }
}

/// Settings of a subcommand that the command line gives.
#[derive(Clone, Debug)]
pub(crate) struct Settings<S> {
    given: StepOptions,
    /// The first that the table refuses.
    refused: Option<OptionError>,
    of: PhantomData<S>,
}

impl<S: Subcommand> Settings<S> {
    /// Settings of a step with this rule for a model, whose descriptors get settings of some
    /// parameters.
    ///
    /// In a model of 16-bit and wider parameters only 16-bit ones have master weights, and only
    /// bf16 values are rounded at random. A model without 16-bit parameters that asks for master
    /// weights is left to the planner, which refuses them.
    ///
    /// # Errors
    /// Settings without effect, or that contradict each other; a part of a name that no parameter
    /// has; a cap of too many buckets.
    pub(crate) fn of_model(
        &self,
        rule: Optimizer,
        params: &mut [ParamDesc],
    ) -> anyhow::Result<StepOptions> {
        self.refused.clone().map_or(Ok(()), |error| Err(refused(error)))?;
        let mut options = StepOptions { rule, ..self.given.clone() };
        options.describe(params).map_err(refused)?;
        options.check_kept(params).map_err(refused)?;
        for Overlap { counts, yields, param, count } in overlaps(&options, params) {
            let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
            note(&format!(
                "note: {} `{}` counts for `{}`{more}, and {} `{}` does not",
                flag_of(counts.name),
                counts.text,
                Quoted(&param),
                flag_of(yields.name),
                yields.text
            ));
        }
        let asked = options.precision;
        if params.iter().any(|param| matches!(param.dtype, DType::F16 | DType::BF16)) {
            let rounding = match asked.state {
                StateDType::Compute | StateDType::Int8 => Rounding::Nearest,
                StateDType::Bf16 => asked.rounding,
            };
            let precision = Precision { master: Master::None, rounding, ..asked };
            options.precision_of =
                [DType::F32, DType::F64].map(|dtype| PrecisionOf { dtype, precision }).into();
        }
        Ok(options)
    }

    /// Parts of the names of parameters without weight decay.
    pub(crate) fn exclude(&self) -> &[String] {
        &self.given.exclude
    }

    /// How exactly parameters and state are kept.
    pub(crate) fn precision(&self) -> Precision {
        self.given.precision
    }

    /// Factors and decays of some parameters, each with its flag.
    pub(crate) fn numbers_of_params(&self) -> impl Iterator<Item = (String, f64)> {
        let StepOptions { lr_scale, weight_decay_of, .. } = &self.given;
        let decays = weight_decay_of.iter().map(|of| ("weight_decay_of", of));
        let all = lr_scale.iter().map(|of| ("lr_scale", of)).chain(decays);
        all.map(|(name, of)| (format!("{} {}", flag_of(name), Quoted(&of.pattern)), of.value))
    }

    /// ZeRO stage.
    pub(crate) fn zero(&self) -> u8 {
        self.given.zero
    }

    /// The limits of launches that were asked for, otherwise the default ones.
    pub(crate) fn limits(&self) -> LaunchLimits {
        self.given.limits(LaunchLimits::default())
    }

    /// Bytes of arguments of one launch, if they were asked for.
    pub(crate) fn argument_bytes(&self) -> Option<usize> {
        self.given.argument_bytes
    }

    /// The flag of the first setting that differs from its default, of those beyond these parts of
    /// the table and beyond those of these names.
    pub(crate) fn changed_beyond(&self, sections: &[Section], names: &[&str]) -> Option<String> {
        let changed = self.given.changed().unwrap_or_default();
        let mut beyond = changed.iter().filter(|changed| !sections.contains(&changed.section));
        let other = beyond.find(|changed| !names.contains(&changed.name));
        other.map(|changed| flag_of(changed.name))
    }

    /// Whether a setting asks for the step of many ranks.
    pub(crate) fn asks_for_ranks(&self) -> bool {
        let changed = self.given.changed().unwrap_or_default();
        changed.iter().any(|changed| !Step::has(changed.name, changed.section))
    }
}

/// Words for a flag that takes several ranks, where the flag that `what` names gives one or is
/// missing.
pub(crate) fn expected_several(ranks: Option<usize>, what: &str) -> String {
    match ranks {
        Some(count) => format!("expected {what} of 2 or more, found {count}"),
        None => format!("expected {what} too, found no such flag"),
    }
}

/// The identifiers of a subcommand's flags beyond those of a step of one process.
pub(crate) fn ids_of_ranks<S: Subcommand>() -> Vec<Id> {
    let ids_of = |command: Command| -> Vec<Id> {
        command.get_arguments().map(|arg| arg.get_id().clone()).collect()
    };
    let of_step = ids_of(Settings::<Step>::augment_args(Command::new("flags")));
    let mut ids = ids_of(Settings::<S>::augment_args(Command::new("flags")));
    ids.retain(|id| !of_step.contains(id));
    ids
}

/// Declares a flag for every setting.
struct Declared<S> {
    args: Vec<Arg>,
    of: PhantomData<S>,
}

impl<S: Subcommand> Visit for Declared<S> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if !S::has(row.name, row.section) {
            return Ok(());
        }
        let name = row.name;
        let says = row.says.trim_end_matches('.');
        let arg = Arg::new(name)
            .long(name.replace('_', "-"))
            .value_name(name.to_uppercase())
            .help_heading(row.section.heading())
            .help(says.to_owned());
        let arg = match row.choices.as_slice() {
            _ if row.is_switch => arg.action(ArgAction::SetTrue),
            [] => {
                let again = if row.is_list { "; may be repeated" } else { "" };
                let help = format!("{says} ({}{again})", row.range);
                let action = if row.is_list { ArgAction::Append } else { ArgAction::Set };
                let parser = move |text: &str| parsed(name, text);
                arg.help(help).action(action).value_parser(ValueParser::new(parser))
            }
            choices => {
                let values = choices.iter().map(|choice| {
                    let shown = choice.name.replace('_', "-");
                    PossibleValue::new(shown).alias(choice.name).help(choice.says)
                });
                arg.value_parser(PossibleValuesParser::new(values))
            }
        };
        let arg = match row.value {
            Some(value) if !row.is_switch => arg.default_value(value.replace('_', "-")),
            _ => arg,
        };
        let earlier = |value: bool| {
            let of = EARLIER.iter().filter(move |(_, of, _)| *of == name);
            of.filter(move |(.., stands)| stands.is_some() == value)
        };
        self.args.push(arg.aliases(earlier(false).map(|(flag, ..)| *flag)));
        self.args.extend(
            earlier(true).map(|(flag, ..)| {
                Arg::new(*flag).long(*flag).action(ArgAction::SetTrue).hide(true)
            }),
        );
        Ok(())
    }
}

/// The text of a setting, if it is in range.
fn parsed(name: &'static str, text: &str) -> Result<String, String> {
    let mut set = Set { name, text: text.to_owned(), outcome: Ok(()) };
    let visited = StepOptions::default().each(&mut set);
    match set.outcome.and(visited) {
        Err(OptionError::Range { expected, .. }) => Err(format!("expected {expected}")),
        // A seed alone is told of once all flags are read.
        Ok(()) | Err(_) => Ok(text.to_owned()),
    }
}

/// Sets one setting from a text.
struct Set {
    name: &'static str,
    text: String,
    outcome: Result<(), OptionError>,
}

impl Visit for Set {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if row.name == self.name {
            self.outcome = (row.set)(&self.text);
        }
        Ok(())
    }
}

/// Takes what the command line has given.
struct Taken<'a, S> {
    matches: &'a ArgMatches,
    of: PhantomData<S>,
}

impl<S: Subcommand> Visit for Taken<'_, S> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if !S::has(row.name, row.section) {
            return Ok(());
        }
        let is_given = |id: &str| self.matches.value_source(id) == Some(ValueSource::CommandLine);
        for (flag, of, value) in EARLIER {
            if let Some(value) = value.filter(|_| of == row.name && is_given(flag)) {
                (row.set)(value)?;
            }
        }
        if !is_given(row.name) {
            return Ok(());
        }
        if row.is_switch {
            return (row.set)("true");
        }
        let has_choices = !row.choices.is_empty();
        for text in self.matches.get_many::<String>(row.name).into_iter().flatten() {
            if has_choices {
                (row.set)(&text.replace('-', "_"))?;
            } else {
                (row.set)(text)?;
            }
        }
        Ok(())
    }
}

impl<S: Subcommand> Args for Settings<S> {
    fn augment_args(command: Command) -> Command {
        let mut declared = Declared { args: Vec::new(), of: PhantomData::<S> };
        // The defaults are in range.
        let _ = StepOptions::default().each(&mut declared);
        let ids: Vec<Id> = declared.args.iter().map(|arg| arg.get_id().clone()).collect();
        let distinct: HashSet<&Id> = ids.iter().collect();
        debug_assert_eq!(distinct.len(), ids.len());
        let command = command.args(declared.args);
        command.group(ArgGroup::new(GROUP).multiple(true).args(ids))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }

    fn group_id() -> Option<Id> {
        Some(Id::from(GROUP))
    }
}

impl<S: Subcommand> FromArgMatches for Settings<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = StepOptions::default();
        let mut taken = Taken { matches, of: PhantomData::<S> };
        let refused = given.each(&mut taken).err();
        Ok(Self { given, refused, of: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings that flags give.
    fn given<S: Subcommand>(args: &[&str]) -> StepOptions {
        let command = Settings::<S>::augment_args(Command::new("flags").no_binary_name(true));
        let matches = command.try_get_matches_from(args).expect("flags");
        let settings = Settings::<S>::from_arg_matches(&matches).expect("values");
        assert_eq!(settings.refused, None, "{args:?}");
        settings.given
    }

    /// Every row, with a value that is not its default.
    struct Each(Vec<(&'static str, Section, String)>);

    impl Visit for Each {
        fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
            let other = row.choices.iter().find(|choice| Some(choice.name) != row.value.as_deref());
            let text = match (row.name, other) {
                (_, Some(choice)) => choice.name.to_owned(),
                ("schedule", _) => "constant".to_owned(),
                ("lr_scale" | "weight_decay_of", _) => "w=2".to_owned(),
                ("trust_of", _) => "w=plain".to_owned(),
                ("exclude" | "distributed" | "keep_f32", _) => "w".to_owned(),
                _ if row.is_switch => "true".to_owned(),
                ("accumulate" | "zero" | "rounding_seed" | "local_sgd_begin", _) => "2".to_owned(),
                _ => "4".to_owned(),
            };
            self.0.push((row.name, row.section, text));
            Ok(())
        }
    }

    #[test]
    fn every_setting_is_a_flag_of_a_run_and_sets_what_the_table_sets() {
        let mut each = Each(Vec::new());
        StepOptions::default().each(&mut each).expect("defaults");
        for (name, section, text) in each.0 {
            if !Train::has(name, section) {
                assert!(["threads", "distributed"].contains(&name), "{name} is no flag");
                continue;
            }
            let mut expected = StepOptions::default();
            // A seed is refused without what it is a seed of.
            let before: &[&str] = if name == "rounding_seed" { &["stochastic"] } else { &[] };
            for text in before {
                let (text, name) = ((*text).to_owned(), "rounding");
                expected.each(&mut Set { name, text, outcome: Ok(()) }).expect("a row");
            }
            let mut set = Set { name, text: text.clone(), outcome: Ok(()) };
            expected.each(&mut set).expect("a row");
            assert_eq!(set.outcome, Ok(()), "{name}");
            assert_ne!(expected, StepOptions::default(), "{name}");
            let flag = flag_of(name);
            let shown = text.replace('_', "-");
            let mut args = vec![flag.as_str()];
            args.extend((text != "true").then_some(shown.as_str()));
            args.extend(before.iter().flat_map(|text| ["--rounding", text]));
            assert_eq!(given::<Train>(&args), expected, "{args:?}");
        }
    }

    #[test]
    fn earlier_flags_set_what_they_did() {
        for (earlier, now) in [
            (&["--apart"][..], &["--separate"][..]),
            (&["--table", "resident"], &["--tables", "resident"]),
            (&["--rings", "3"], &["--comm-streams", "3"]),
            (&["--gradient-merge", "3"], &["--accumulate", "3"]),
            (&["--reduce-each"], &["--reduced", "per-micro-step"]),
            (&["--merge-reduce-each"], &["--reduced", "per_micro_step"]),
            (&["--adaptive"], &["--local-sgd-interval", "adaptive"]),
        ] {
            assert_eq!(given::<Train>(earlier), given::<Train>(now), "{earlier:?}");
            assert_ne!(given::<Train>(now), StepOptions::default(), "{now:?}");
        }
    }
}
