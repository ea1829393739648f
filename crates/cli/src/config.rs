//! Files of flags: `--config FILE` gives a command flags that are not typed, and `--write-config
//! FILE` writes the file that repeats a run.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command};
use fusestep_collective::{Carrier, Started, started_together};
use fusestep_collective_processes::launched_processes;
use fusestep_tensor::Quoted;
use fusestep_tensor_file::{Disk, Files, check_writable};
use toml::{Table, Value};

use crate::output::{is_first_process, write_page};
use crate::places::{require_apart, require_folder};
use crate::settings::stands_for;

/// Flags of files of flags.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ConfigArgs {
    /// File of flags in TOML: `clip-norm = 1.0`. Flags that are typed win; paths in it start at the
    /// current folder
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Write the file of flags that repeats this run, once it is done
    #[arg(long, value_name = "FILE")]
    write_config: Option<PathBuf>,
    /// Text of that file; `None` where a flag is no text.
    #[arg(skip)]
    pub(crate) given: Option<String>,
    /// Files that other flags name.
    #[arg(skip)]
    pub(crate) others: Vec<OfFlag>,
}

/// A file and the flag that names it.
#[derive(Clone, Debug)]
pub(crate) struct OfFlag {
    flag: String,
    path: PathBuf,
}

impl ConfigArgs {
    /// Refuses a file of flags that could not be written, before any work.
    ///
    /// # Errors
    /// Flags that are no text, or a place that takes no file.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let Some(path) = &self.write_config else {
            return Ok(());
        };
        ensure!(
            self.given.is_some(),
            "--write-config: expected flags that are UTF-8, found other bytes; rename that file"
        );
        for OfFlag { flag, path: other } in &self.others {
            require_apart((flag, Some(other)), &[("--write-config", Some(path))])?;
        }
        require_folder("--write-config", path)?;
        check_writable(path).context("--write-config")
    }

    /// Writes the file of flags, if it was asked for. Of ranks that are processes rank 0 does.
    pub(crate) fn write(&self) -> anyhow::Result<()> {
        let (Some(path), Some(text)) = (&self.write_config, &self.given) else {
            return Ok(());
        };
        if is_first_process() {
            write_page(path, text)?;
        }
        Ok(())
    }
}

/// Flags beside those that are typed.
#[derive(Debug, Default)]
pub(crate) struct FromFile {
    path: PathBuf,
    /// Flags, as `--name=value`, and a model without its name.
    arguments: Vec<OsString>,
}

impl FromFile {
    /// The flags of the file that is typed behind `--config`; none without such a file.
    ///
    /// # Errors
    /// A file that cannot be read or is no TOML, a key that is no flag, a value of another kind.
    pub(crate) fn read(command: &Command, typed: &[OsString]) -> anyhow::Result<Self> {
        // What is missing may stand in the file, so only what is there counts.
        let found = command.clone().ignore_errors(true).try_get_matches_from(typed);
        let Ok(matches) = found else {
            return Ok(Self::default());
        };
        let Some((name, matches)) = matches.subcommand() else {
            return Ok(Self::default());
        };
        let path = matches.try_get_one::<PathBuf>("config").ok().flatten();
        let (Some(path), Some(command)) = (path, command.find_subcommand(name)) else {
            return Ok(Self::default());
        };
        let mut arguments = Vec::new();
        for (key, value) in read(path)? {
            let said = || format!("{}: `{}`", path.display(), Quoted(&key));
            let Some(arg) = command.get_arguments().find(|arg| key_of(arg) == Some(&key)) else {
                bail!("{}: {}", said(), unknown(command, &key));
            };
            if !is_typed(command, matches, arg) {
                arguments.extend(given(arg, &value).with_context(said)?);
            }
        }
        Ok(Self { path: path.clone(), arguments })
    }

    /// Typed arguments, with these flags behind the subcommand's name.
    pub(crate) fn with(&self, typed: &[OsString], command: &Command) -> Vec<OsString> {
        let is_name = |text: &OsString| command.find_subcommand(text).is_some();
        let at = typed.iter().skip(1).position(is_name).map_or(typed.len(), |at| at + 2);
        let (before, behind) = typed.split_at(at);
        [before, &self.arguments, behind].concat()
    }

    /// A word on where a flag stands, if it is one of these.
    pub(crate) fn note(&self, flag: &str) -> Option<String> {
        let name = flag.split([' ', '=']).next()?;
        let is_own = |argument: &OsString| {
            argument.to_str().and_then(|text| text.split('=').next()) == Some(name)
        };
        let own = self.arguments.iter().any(is_own);
        own.then(|| format!("note: {name} stands in {}", self.path.display()))
    }
}

/// The keys and values of a file of flags.
fn read(path: &Path) -> anyhow::Result<Table> {
    let named = || format!("--config {}", path.display());
    let bytes = Disk.read(path).with_context(named)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| {
        anyhow!("--config {}: expected a text in UTF-8, found other bytes", path.display())
    })?;
    text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        anyhow!(
            "{}:{}: expected TOML with a flag a line, such as `clip-norm = 1.0`: {}",
            path.display(),
            before.lines().count().max(1) + usize::from(before.ends_with('\n')),
            Quoted(error.message())
        )
    })
}

/// The key of a flag, or of the model; `None` for flags that are about files of flags or help.
fn key_of(arg: &Arg) -> Option<&str> {
    let about_files = ["config", "write_config", "help", "quiet", "verbose"];
    let id = arg.get_id().as_str();
    if about_files.contains(&id) || stands_for(id).is_some() {
        return None;
    }
    if arg.is_positional() { Some(id) } else { arg.get_long() }
}

/// A refusal of a key, with the key that it may stand for.
fn unknown(command: &Command, key: &str) -> String {
    let name = command.get_name();
    let keys = command.get_arguments().filter_map(key_of);
    let alike = keys.map(|known| (strsim::jaro(&key.replace('_', "-"), known), known));
    let nearest = alike.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(alike, _)| *alike > 0.8);
    let meant = nearest.map_or_else(
        || format!("`fusestep {name} --help` lists them"),
        |(_, known)| format!("did you mean `{known}`?"),
    );
    format!("expected the name of a flag of {name} without its dashes, found no such flag; {meant}")
}

/// Whether a flag, or an earlier one that stands for it, is typed.
fn is_typed(command: &Command, matches: &ArgMatches, arg: &Arg) -> bool {
    let typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let own = arg.get_id().as_str();
    let mut earlier = command.get_arguments().map(|arg| arg.get_id().as_str());
    typed(own) || earlier.any(|id| stands_for(id) == Some(own) && typed(id))
}

/// The arguments that a value of a file stands for.
fn given(arg: &Arg, value: &Value) -> anyhow::Result<Vec<OsString>> {
    let (takes_value, is_list) =
        (arg.get_action().takes_values(), matches!(arg.get_action(), ArgAction::Append));
    let flag = format!("--{}", arg.get_long().unwrap_or_default());
    let found = || Quoted(&value.to_string()).to_string();
    match value {
        Value::Boolean(true) if !takes_value => Ok(vec![flag.into()]),
        Value::Boolean(false) if !takes_value => Ok(Vec::new()),
        _ if !takes_value => bail!("expected true or false, found {}", found()),
        Value::Array(values) if is_list => {
            let texts = values.iter().map(|value| text(value).map(|text| (flag.as_str(), text)));
            let texts: anyhow::Result<Vec<_>> = texts.collect();
            Ok(texts?.into_iter().map(|(flag, text)| format!("{flag}={text}").into()).collect())
        }
        Value::Array(_) => bail!("expected one value, found the list {}", found()),
        value if arg.is_positional() => Ok(vec![text(value)?.into()]),
        value => Ok(vec![format!("{flag}={}", text(value)?).into()]),
    }
}

/// The text that is typed for a value.
fn text(value: &Value) -> anyhow::Result<String> {
    Ok(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        value => bail!("expected a number or a text, found {}", Quoted(&value.to_string())),
    })
}

/// Flags of what a run writes, and of the checkpoint that it goes on from. A run that is repeated
/// would write over these files, or add to them.
const OUTPUTS: [&str; 12] = [
    "checkpoint",
    "save_every",
    "resume",
    "log",
    "tensorboard",
    "report",
    "html",
    "svg",
    "out",
    "state_out",
    "average_out",
    "flight_recorder",
];

/// Flags of which a run's file has the defaults, too: with another default it would be another run.
const DECIDING: [&str; 6] = ["model", "optimizer", "epochs", "batch", "seed", "dtype"];

/// Flags of files beside the one of flags itself.
const FILES: [&str; 11] = [
    "model",
    "params",
    "grads",
    "state",
    "out",
    "state_out",
    "average_out",
    "log",
    "report",
    "html",
    "svg",
];

/// The files that are typed for a run of `command`.
pub(crate) fn files_of(command: &Command, matches: &ArgMatches) -> Vec<OfFlag> {
    let typed = command.get_arguments().filter_map(|arg| {
        let id = arg.get_id().as_str();
        let path = matches.try_get_one::<PathBuf>(id).ok().flatten()?;
        let flag =
            arg.get_long().map_or_else(|| "the model".to_owned(), |long| format!("--{long}"));
        FILES.contains(&id).then(|| OfFlag { flag, path: path.clone() })
    });
    typed.collect()
}

/// The file of flags that repeats a run of `command`; `None` where a flag is no text.
pub(crate) fn repeating(command: &Command, matches: &ArgMatches) -> Option<String> {
    let (mut table, mut outputs) = (Table::new(), Table::new());
    let is_output = |id: &str| {
        // Of `step` a state that is read is no output.
        OUTPUTS.contains(&id) || id == "any_settings" && matches.try_contains_id("resume").is_ok()
    };
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        let source = matches.value_source(id);
        let decides = DECIDING.contains(&id) && source == Some(ValueSource::DefaultValue);
        let earlier = stands_for(id).is_some() && source == Some(ValueSource::CommandLine);
        if source != Some(ValueSource::CommandLine) && !decides || id == "json" {
            continue;
        }
        let key = if earlier { arg.get_long() } else { key_of(arg) };
        let Some(key) = key else { continue };
        let value = if arg.get_action().takes_values() {
            let texts = matches.get_raw(id).into_iter().flatten().map(OsStr::to_str);
            let mut values: Vec<Value> =
                texts.map(|text| text.map(value_of)).collect::<Option<_>>()?;
            match arg.get_action() {
                ArgAction::Append => Value::Array(values),
                _ => values.pop()?,
            }
        } else {
            Value::Boolean(true)
        };
        let table = if is_output(id) { &mut outputs } else { &mut table };
        table.insert(key.to_owned(), value);
    }
    let is_of = |id: &str| matches.try_contains_id(id).is_ok();
    if is_of("engine") && is_of("ranks") && !table.contains_key("ranks") {
        // Ranks that a launcher has started are as many without it.
        let started = launched_processes().ok().flatten();
        if let Some(ranks) = started.and_then(|ranks| i64::try_from(ranks).ok()) {
            table.insert("ranks".to_owned(), Value::Integer(ranks));
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    let start = repeated_by(command);
    let text = toml::to_string(&table).ok()?;
    let outputs = toml::to_string(&outputs).ok()?;
    let mut outputs: String = outputs.lines().map(|line| format!("# {line}\n")).collect();
    let is_resumed = typed_of(matches, "resume").is_some();
    if !outputs.is_empty() {
        let and = if is_resumed { "what it went on from" } else { "would write over" };
        outputs.insert_str(0, &format!("# What this run wrote, and {and}:\n"));
    }
    let unless = if is_resumed {
        ", but from its beginning: it went on from the checkpoint below, as that was then"
    } else if writes_over_inputs(matches) {
        ", if its inputs are as they were: it wrote over them"
    } else {
        ""
    };
    Some(format!("# `{start}` repeats this run of fusestep {version}{unless}.\n{text}{outputs}"))
}

/// The text that is typed for a flag, of commands that have it.
fn typed_of(matches: &ArgMatches, id: &str) -> Option<Vec<OsString>> {
    matches.try_contains_id(id).ok()?;
    let is_typed = matches.value_source(id) == Some(ValueSource::CommandLine);
    is_typed.then(|| matches.get_raw(id).into_iter().flatten().map(OsStr::to_owned).collect())
}

/// Whether `step` puts its outputs in place of its inputs.
fn writes_over_inputs(matches: &ArgMatches) -> bool {
    [("params", "out"), ("state", "state_out")].iter().any(|(input, output)| {
        let input = typed_of(matches, input);
        input.is_some() && input == typed_of(matches, output)
    })
}

/// The command that takes the file of flags: with the outputs that it requires, and under the
/// launcher that this process was started by, where ranks of this program alone cannot be.
fn repeated_by(command: &Command) -> String {
    let required = command
        .get_arguments()
        .filter(|arg| arg.is_required_set() && OUTPUTS.contains(&arg.get_id().as_str()));
    let required = required.filter_map(|arg| Some(format!(" --{} FILE", arg.get_long()?)));
    let under = match started_together() {
        Some(Started { carrier: Carrier::Mpi, ranks: Some(ranks), .. }) => {
            format!("mpirun -n {ranks} ")
        }
        _ => String::new(),
    };
    let name = command.get_name();
    format!("{under}fusestep {name} --config FILE{}", required.collect::<String>())
}

/// The value that reads back as this very text.
fn value_of(text: &str) -> Value {
    if let Some(number) = text.parse::<i64>().ok().filter(|number| number.to_string() == text) {
        return Value::Integer(number);
    }
    match text.parse::<f64>() {
        Ok(number) if number.to_string() == text => Value::Float(number),
        _ => Value::String(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_written_as_what_reads_back_as_it() {
        for given in ["1", "-1", "0.001", "1e-3", "1.0", "01", "+1", "inf", "a b", "\"", "true", ""]
        {
            let table = Table::from_iter([("key".to_owned(), value_of(given))]);
            let written = toml::to_string(&table).unwrap();
            let read: Table = written.parse().unwrap();
            assert_eq!(text(&read["key"]).unwrap(), given, "{written}");
        }
    }
}
