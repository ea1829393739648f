//! The command line: what is typed, as clap reads it, and its errors in a form that is safe to
//! print.

use std::ffi::OsString;
use std::io::Write;

use anstream::{AutoStream, ColorChoice};
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches};
use fusestep_collective_processes::says_first;
use fusestep_tensor::{Quoted, escaped};

use crate::Cli;
use crate::config::{FromFile, files_of, repeating};
use crate::help::with_help;
use crate::rule_names::meant;

/// The command as clap reads it; help follows what is `typed`.
pub(crate) fn command(typed: &[OsString]) -> clap::Command {
    with_negative_numbers(with_help(Cli::command(), typed))
}

/// Reads the command line and the file of flags that it names; ends the program where it asks for
/// help or cannot be understood.
///
/// # Errors
/// The fault of the file of flags.
pub(crate) fn parse() -> anyhow::Result<Cli> {
    let typed: Vec<OsString> = std::env::args_os().collect();
    let from_file = FromFile::read(&command(&typed), &typed)?;
    let all = from_file.with(&typed, &command(&typed));
    let mut command = command(&all);
    let matches = command.try_get_matches_from_mut(&all);
    let cli = matches.and_then(|matches| {
        let mut cli =
            Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        let of_command = matches.subcommand().and_then(|(name, matches)| {
            let command = command.find_subcommand(name)?;
            Some((repeating(command, matches), files_of(command, matches)))
        });
        if let (Some(config), Some((given, others))) = (cli.command.config_mut(), of_command) {
            (config.given, config.others) = (given, others);
        }
        Ok(cli)
    });
    Ok(cli.unwrap_or_else(|error| refuse(error, &from_file, &all)))
}

/// Ends the program with an error, and says where the flag stands that it names.
fn refuse(error: clap::Error, from_file: &FromFile, all: &[OsString]) -> ! {
    let error = quoted(error, all);
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => Some(flag.clone()),
        _ => None,
    };
    if !error.use_stderr() {
        // Each rank is asked for it; nobody is left to tell if it cannot be printed.
        let _ = error.print();
    } else if says_first(&error.to_string()) {
        let note = flag.and_then(|flag| from_file.note(&flag)).map(|note| format!("{note}\n"));
        let said = match AutoStream::choice(&std::io::stderr()) {
            ColorChoice::Never => error.render().to_string(),
            _ => error.render().ansi().to_string(),
        };
        // In one piece, since other ranks may write there, too.
        let said = said + &escaped(&note.unwrap_or_default());
        let _ = std::io::stderr().write_all(said.as_bytes());
    }
    std::process::exit(error.exit_code())
}

/// Takes `-1` for a flag's value, so that the flag can say what it expects.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes_value = arg.get_action().takes_values() && !arg.is_positional();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(with_negative_numbers)
}

/// An error that quotes typed text short, with nothing that a terminal would obey. Of flags that
/// go with none of a group it names those that were `typed`, and of advice what helps.
fn quoted(mut error: clap::Error, typed: &[OsString]) -> clap::Error {
    let is_typed = |flag: &String| {
        let name = flag.split([' ', '=']).next().unwrap_or_default();
        let typed = typed.iter().filter_map(|text| text.to_str()?.split('=').next());
        typed.clone().any(|typed| typed == name)
    };
    let quoted = |(kind, value): (ContextKind, &ContextValue)| match value {
        ContextValue::Strings(flags) if kind == ContextKind::PriorArg => {
            let named: Vec<String> = flags.iter().filter(|flag| is_typed(flag)).cloned().collect();
            (!named.is_empty()).then_some((kind, ContextValue::Strings(named)))
        }
        // Advice to pass what looks like a flag as a value: no value here begins with dashes.
        ContextValue::StyledStrs(all)
            if all.iter().any(|text| text.to_string().contains("as a value")) =>
        {
            let helpful = all.iter().filter(|text| !text.to_string().contains("as a value"));
            Some((kind, ContextValue::StyledStrs(helpful.cloned().collect())))
        }
        ContextValue::String(text) => Some((kind, ContextValue::String(Quoted(text).to_string()))),
        // Advice that repeats typed text.
        ContextValue::StyledStrs(all) => {
            let is_safe = |text: String| Quoted(&text).to_string() == text;
            let safe = all.iter().all(|text| is_safe(text.to_string()));
            (!safe).then_some((kind, ContextValue::None))
        }
        _ => None,
    };
    for (kind, value) in error.context().filter_map(quoted).collect::<Vec<_>>() {
        error.insert(kind, value);
    }
    if let Some(tip) = flag_of_others(&error, typed) {
        // What clap takes for alike is another flag altogether, as is its usage.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    if let Some(meant) = in_other_case(&error) {
        error.insert(ContextKind::SuggestedValue, ContextValue::String(meant));
    }
    if let Some(meant) = meant_rule(&error) {
        let tip = StyledStr::from(format!("`{meant}` asks for that rule here"));
        error.remove(ContextKind::SuggestedValue);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// A word on other subcommands that have a flag of this name, if the typed one has none.
fn flag_of_others(error: &clap::Error, typed: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let name = flag.strip_prefix("--")?;
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let command = Cli::command();
    let own = typed.iter().find_map(|text| command.find_subcommand(text))?;
    let has = |of: &clap::Command| {
        of.get_arguments().any(|arg| arg.get_long() == Some(name) && !arg.is_hide_set())
    };
    let others = command.get_subcommands().filter(|of| has(of)).map(clap::Command::get_name);
    let others: Vec<&str> = others.collect();
    let (last, before) = others.split_last()?;
    let all = match before {
        [] => (*last).to_owned(),
        before => format!("{} and {last}", before.join(", ")),
    };
    Some(format!("`{flag}` is a flag of {all}, and has no effect in {}", own.get_name()))
}

/// The value that the typed one is but for capitals: what clap takes for alike may be another.
fn in_other_case(error: &clap::Error) -> Option<String> {
    let (Some(ContextValue::String(typed)), Some(ContextValue::Strings(values))) =
        (error.get(ContextKind::InvalidValue), error.get(ContextKind::ValidValue))
    else {
        return None;
    };
    values.iter().find(|value| value.eq_ignore_ascii_case(typed)).cloned()
}

/// The flags that a rule's name stands for that is unknown here and known elsewhere.
fn meant_rule(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?;
    let typed = text(ContextKind::InvalidValue)?;
    if flag.starts_with("--optimizer ") { meant(&typed) } else { None }
}

/// A message in which typed names break no line; lines of its own stay.
pub(crate) fn in_one_line(mut message: String, typed: impl Iterator<Item = OsString>) -> String {
    for argument in typed {
        let argument = argument.to_string_lossy();
        let value = argument.split_once('=').map_or("", |(_, value)| value);
        for text in [&*argument, value] {
            if text.contains(['\n', '\t']) && !text.trim().is_empty() {
                let safe = text.replace('\n', "\\u{a}").replace('\t', "\\u{9}");
                message = message.replace(text, &safe);
            }
        }
    }
    message
}
