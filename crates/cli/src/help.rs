//! Help of subcommands: headings of flags, examples, and the settings of one rule alone.

use std::ffi::{OsStr, OsString};

use clap::{Arg, ArgAction, Command, ValueEnum};

use crate::headings::{LAUNCHES, MODEL, OUTPUT, PRECISION, RANKS, RULE, SAVING};
use crate::rules::Rule;
use crate::tasks::help_on_rates;
use crate::{bench, rule_flags};

/// A subcommand whose flags stand under headings.
struct Grouped {
    name: &'static str,
    examples: &'static [&'static str],
}

const GROUPED: [Grouped; 5] = [
    Grouped {
        name: "plan",
        examples: &[
            "fusestep plan data/shapes/gpt2.json",
            "fusestep plan data/shapes/gpt2.json --world 8 --zero 1 --clip-norm 1 --html plan.html",
            "fusestep plan model.safetensors --optimizer lars --help",
        ],
    },
    Grouped {
        name: "step",
        examples: &[
            "fusestep step --params p.safetensors --grads g.safetensors --out next.safetensors",
            "fusestep step --config step.toml --steps 10",
        ],
    },
    Grouped {
        name: "train",
        examples: &[
            "fusestep train --epochs 2 --report report.html",
            "fusestep train --ranks 4 --zero 1 --clip-norm 1 --checkpoint run",
            "fusestep train --optimizer lars --help",
        ],
    },
    Grouped {
        name: "bench",
        examples: &[
            "fusestep bench data/shapes/gpt2.json",
            "fusestep bench data/shapes/gpt2.json --ranks 2 --zero 1",
            "fusestep bench --collective all-reduce --ranks 2 --sizes 4KiB,1MiB",
        ],
    },
    Grouped {
        name: "verify",
        examples: &[
            "fusestep verify data/shapes/resnet50.json --lanes 4 --worlds 1,2,3,4",
            "fusestep verify model.json --lanes 8 --clip-norm 1 --zero 0,2 --engine processes",
        ],
    },
];

/// Puts flags under headings and examples at the end. Where `typed` names a rule, the help has that
/// rule's settings alone.
pub(crate) fn with_help(command: Command, typed: &[OsString]) -> Command {
    let rule = typed_rule(typed);
    // `mut_subcommand` would put each behind the others.
    command.mut_subcommands(|command| {
        let Some(grouped) = GROUPED.iter().find(|grouped| grouped.name == command.get_name())
        else {
            return command;
        };
        let command = match rule {
            Some(rule) => of_rule(command, rule),
            None => command,
        };
        let command = grouped.put(command, rule);
        if grouped.name == "bench" { bench::args::with_headings(command) } else { command }
    })
}

impl Grouped {
    fn put(&self, command: Command, rule: Option<Rule>) -> Command {
        let command = command.mut_args(|arg| {
            let flag = !arg.is_positional() && arg.get_help_heading().is_none();
            match heading_of(arg.get_id().as_str()).filter(|_| flag) {
                Some(heading) => arg.help_heading(heading),
                None => arg,
            }
        });
        let mut end = format!("Examples:\n  {}", self.examples.join("\n  "));
        let command = match self.name {
            "train" => {
                end = format!("{}\n\n{end}", help_on_rates(rule));
                let help = "Learning rate per step, at least 0 [default: as listed at the end]";
                command.mut_arg("lr", |arg| arg.help(help))
            }
            _ => command,
        };
        let help = Arg::new("help").short('h').long("help").action(ArgAction::Help);
        let help = help.help("Print help; -h prints a short form").help_heading(OUTPUT);
        command.disable_help_flag(true).arg(help).after_help(end)
    }
}

/// The heading of a flag that is no setting of the table, by its identifier.
fn heading_of(id: &str) -> Option<&'static str> {
    Some(match id {
        "layers" | "width" | "heads" | "context" | "model" | "epochs" | "batch" | "seed"
        | "params" | "grads" | "steps" | "rounds" => MODEL,
        "optimizer" | "excluded" => RULE,
        "dtype" => PRECISION,
        "backend" | "threads" => LAUNCHES,
        "checkpoint" | "save_every" | "resume" | "any_settings" | "any_parameters" | "state"
        | "out" | "state_out" | "average_out" => SAVING,
        "log" | "tensorboard" | "report" | "json" | "html" | "svg" | "config" | "write_config" => {
            OUTPUT
        }
        _ => RANKS,
    })
}

/// Hides flags of other rules, and says of the others what they are to this one.
fn of_rule(command: Command, rule: Rule) -> Command {
    let command = rule_flags::of_rule(command, rule.name());
    let scales = matches!(rule.name(), "lars" | "lamb");
    command.mut_args(|arg| match arg.get_id().as_str() {
        "excluded" | "trust_of" if !scales => arg.hide(true),
        _ => arg,
    })
}

/// The rule that is typed behind `--optimizer`, if there is one of its name.
fn typed_rule(typed: &[OsString]) -> Option<Rule> {
    let mut found = None;
    let mut rest = typed.iter().map(OsString::as_os_str);
    while let Some(text) = rest.next().and_then(OsStr::to_str) {
        let name = match text {
            "--" => break,
            "--optimizer" => rest.next().and_then(OsStr::to_str),
            text => text.strip_prefix("--optimizer="),
        };
        found = name.and_then(|name| Rule::from_str(name, false).ok()).or(found);
    }
    found
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;
    use crate::command_line::command;

    /// The help that these arguments print.
    fn help(args: &[&str]) -> String {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let error = command(&args).try_get_matches_from(&args).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{error}");
        error.to_string()
    }

    #[test]
    fn flags_stand_under_headings_and_examples_at_the_end() {
        for Grouped { name, examples } in GROUPED {
            for form in ["-h", "--help"] {
                let text = help(&["fusestep", name, form]);
                let headings = [MODEL, RULE, PRECISION, "Clipping and scaling", OUTPUT];
                let headings = headings.iter().filter(|found| (name, **found) != ("plan", MODEL));
                let places = headings.map(|heading| {
                    let place = text.find(&format!("\n{heading}:\n"));
                    place.unwrap_or_else(|| panic!("{name} lacks {heading}: {text}"))
                });
                assert!(places.collect::<Vec<_>>().is_sorted(), "{text}");
                assert!(!text.contains("\nOptions:"), "{text}");
                let end = text.split("Examples:\n").nth(1).expect("examples");
                assert!((2..=3).contains(&end.trim().lines().count()), "{end}");
            }
            for example in examples {
                let args: Vec<OsString> = example.split(' ').map(OsString::from).collect();
                let parsed = command(&args).try_get_matches_from(&args);
                let kind = parsed.err().map(|error| error.kind());
                let of_file = example.contains("--config");
                let expected =
                    if of_file { Some(ErrorKind::MissingRequiredArgument) } else { None };
                let is_help = example.ends_with("--help") && kind == Some(ErrorKind::DisplayHelp);
                assert!(kind == expected || is_help, "{example}: {kind:?}");
            }
        }
    }

    #[test]
    fn help_on_a_rule_has_its_settings_alone() {
        for form in [&["--optimizer", "lars"][..], &["--optimizer=lars"]] {
            let text = help(&[&["fusestep", "train"], form, &["--help"]].concat());
            for own in ["--trust-coefficient", "--momentum <", "--excluded", "lars          10"] {
                assert!(text.contains(own), "lacks {own}: {text}");
            }
            for foreign in ["--beta1", "--amsgrad", "--nesterov", "adamw, adam", "lion  "] {
                assert!(!text.contains(foreign), "{foreign}: {text}");
            }
        }
        let text = help(&["fusestep", "plan", "--optimizer", "lion", "-h"]);
        assert!(text.contains("Share of the moment") && text.contains("[default: 0.9]"), "{text}");
        assert!(!text.contains("--excluded") && !text.contains("lion: "), "{text}");
        let text = help(&["fusestep", "plan", "--lr", "1", "-h"]);
        assert!(text.contains("--excluded") && text.contains("--beta1"), "{text}");
    }
}
