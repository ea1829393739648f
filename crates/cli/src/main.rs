//! The `fusestep` command: plan, step, train, launch, bench, checkpoint, check.
#![forbid(unsafe_code)]

mod bench;
mod bench_collective;
mod bench_parts;
mod bench_ranks;
mod ceiling;
mod check;
mod checkpoint;
mod engine;
mod figures;
mod inputs;
mod launch;
mod options;
mod outcomes;
mod output;
mod peers;
mod places;
mod plan;
mod planning;
mod ranks;
mod report;
mod rule_flags;
mod rules;
mod settings;
mod shadow;
mod step;
mod tasks;
mod timer;
mod train;
mod training;
mod values;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
#[cfg(target_os = "linux")]
use std::sync::{Arc, atomic::AtomicBool};
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use fusestep_collective::{Carrier, started_together};
use fusestep_tensor::{Quoted, escaped};

/// The tail of a training step, fused: everything between the end of backward and the next forward.
#[derive(Debug, Parser)]
#[command(name = "fusestep", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print what a step of a model would launch, and why
    Plan(plan::PlanArgs),
    /// Apply N optimizer steps to a file of parameters
    Step(step::StepArgs),
    /// Train a small model with the planned optimizer: on handwritten digits, or on a text
    Train(train::args::TrainArgs),
    /// Start a program as several ranks of this machine, for the engine `processes`
    ///
    /// When a rank fails, the others have 2 seconds to say so and end. Then they get SIGTERM, and 5
    /// seconds later those that have not ended of it are killed. What ranks have started ends with
    /// them, however this command ends.
    Launch(launch::LaunchArgs),
    /// Time a step against the naive plan and the memory bandwidth of this machine
    Bench(bench::args::BenchArgs),
    /// Look into a checkpoint, verify it, or write it for another number of ranks
    Checkpoint(checkpoint::CheckpointArgs),
    /// Print what this machine offers and what is missing
    Check(check::CheckArgs),
}

/// How long a rank of mpirun's stays once it has told its error. The job ends with the first
/// process that fails, and errors that others are about to tell would be lost.
const LAST_WORDS: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    // Does the work of a guard, if this process stands beside a launcher as one.
    fusestep_collective_processes::guard();
    #[cfg(target_os = "linux")]
    let _ = outlive_file_size_limit();
    // Usage errors end here with exit code 2 and clap's own message.
    let cli = parse();
    match run(&cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece, since other ranks may write there, too; nobody is left to tell if it
            // cannot be written. Names and values may come from files, and must not be
            // obeyed by a terminal.
            let error = in_one_line(format!("{error:#}"), std::env::args_os());
            let line = format!("error: {}\n", escaped(&error));
            let _ = std::io::stderr().write_all(line.as_bytes());
            if started_together().is_some_and(|started| started.carrier == Carrier::Mpi) {
                std::thread::sleep(LAST_WORDS);
            }
            ExitCode::FAILURE
        }
    }
}

/// Makes a write beyond `ulimit -f` fail, as a write to a full disk does. Otherwise the system ends
/// the program there without a word, and leaves an unfinished file behind. Programs that are
/// started from here have the signal's default action.
#[cfg(target_os = "linux")]
fn outlive_file_size_limit() -> std::io::Result<signal_hook::SigId> {
    let heard = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, heard)
}

/// Reads the command line; ends the program where it asks for help or cannot be understood.
fn parse() -> Cli {
    let command = Cli::command().mut_subcommand("bench", bench::args::with_headings);
    let command = command.mut_subcommand("train", train::args::with_own_rates);
    let mut command = with_negative_numbers(command);
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let cli = matches.and_then(|matches| {
        Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    });
    cli.unwrap_or_else(|error| quoted(error).exit())
}

/// Takes `-1` for a flag's value, so that the flag can say what it expects.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes_value = arg.get_action().takes_values() && !arg.is_positional();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(with_negative_numbers)
}

/// An error that quotes typed text short, with nothing that a terminal would obey.
fn quoted(mut error: clap::Error) -> clap::Error {
    let quoted = |(kind, value): (ContextKind, &ContextValue)| match value {
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
    error
}

/// A message in which typed names break no line; lines of its own stay.
fn in_one_line(mut message: String, typed: impl Iterator<Item = OsString>) -> String {
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

fn run(command: &Command) -> anyhow::Result<()> {
    if let Command::Launch(_) = command {
        launch::require_first()?;
    }
    let (engine, meets) = match command {
        Command::Bench(args) => (args.engine(), args.collective.ranks.meet()),
        Command::Check(args) => (args.engine, args.ranks.meet()),
        Command::Train(args) => (args.engine, false),
        _ => (None, false),
    };
    engine::require_engine(engine, meets)?;
    options::require_threads_of_environment()?;
    match command {
        Command::Plan(args) => plan::run(args),
        Command::Step(args) => step::run(args),
        Command::Train(args) => train::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Check(args) => check::run(args),
        Command::Checkpoint(args) => checkpoint::run(args),
    }
}
