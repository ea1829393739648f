//! The `fusestep` command: plan, step, train, launch, bench, verify, checkpoint, check,
//! completions, man.
#![forbid(unsafe_code)]

mod bench;
mod bench_collective;
mod bench_parts;
mod bench_ranks;
mod ceiling;
mod check;
mod checkpoint;
mod command_line;
mod config;
mod engine;
mod figures;
mod given_model;
mod headings;
mod help;
mod inputs;
mod launch;
mod manual;
mod options;
mod outcomes;
mod output;
mod peers;
mod places;
mod plan;
mod planning;
mod ranks;
mod records;
mod report;
mod rule_flags;
mod rule_names;
mod rules;
mod settings;
mod shadow;
mod step;
mod tasks;
mod timer;
mod train;
mod training;
mod values;
mod verify;
mod words;

use std::io::Write;
use std::process::ExitCode;
#[cfg(target_os = "linux")]
use std::sync::{Arc, atomic::AtomicBool};
use std::time::Duration;

use clap::{Parser, Subcommand};
use fusestep_collective::{Carrier, started_together};
use fusestep_collective_processes::says_first;
use fusestep_tensor::escaped;

use crate::command_line::{in_one_line, parse};
use crate::config::ConfigArgs;
use crate::output::Told;
use crate::words::in_words;

/// The tail of a training step, fused: everything between the end of backward and the next forward.
#[derive(Debug, Parser)]
#[command(name = "fusestep", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print errors, warnings and the result alone
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = headings::OUTPUT)]
    quiet: bool,
    /// Print more on the way: times, and settings that are chosen
    #[arg(short, long, global = true, help_heading = headings::OUTPUT)]
    verbose: bool,
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
    /// Compare the bits of steps of a model at several numbers of ranks and ZeRO stages
    Verify(verify::args::VerifyArgs),
    /// Look into a checkpoint, verify it, or write it for another number of ranks
    Checkpoint(checkpoint::CheckpointArgs),
    /// Print what this machine offers and what is missing
    Check(check::CheckArgs),
    /// Print a script by which a shell completes this command
    Completions(manual::CompletionsArgs),
    /// Print the manual page of this command, or of one of its subcommands
    Man(manual::ManArgs),
}

impl Command {
    /// Files of flags, of a command that takes them.
    fn config(&self) -> Option<&ConfigArgs> {
        match self {
            Command::Plan(args) => Some(&args.config),
            Command::Step(args) => Some(&args.config),
            Command::Train(args) => Some(&args.config),
            Command::Bench(args) => Some(&args.config),
            _ => None,
        }
    }

    /// Files of flags, to write into.
    fn config_mut(&mut self) -> Option<&mut ConfigArgs> {
        match self {
            Command::Plan(args) => Some(&mut args.config),
            Command::Step(args) => Some(&mut args.config),
            Command::Train(args) => Some(&mut args.config),
            Command::Bench(args) => Some(&mut args.config),
            _ => None,
        }
    }
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
    match parse().and_then(|cli| run(&cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece, since other ranks may write there, too; nobody is left to tell if it
            // cannot be written. Names and values may come from files, and must not be
            // obeyed by a terminal.
            let error = in_one_line(in_words(&error), std::env::args_os());
            // Ranks that have met name themselves, and each says its own.
            if says_first(&error) {
                let line = format!("error: {}\n", escaped(&error));
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
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

fn run(cli: &Cli) -> anyhow::Result<()> {
    let command = &cli.command;
    output::tell(match (cli.quiet, cli.verbose) {
        (true, _) => Told::Quiet,
        (_, true) => Told::More,
        _ => Told::Usual,
    });
    if let Command::Launch(_) = command {
        launch::require_first()?;
    }
    let (engine, meets) = match command {
        Command::Bench(args) => (args.engine(), args.collective.ranks.meet()),
        Command::Check(args) => (args.engine, args.ranks.meet()),
        Command::Train(args) => (args.engine, false),
        Command::Verify(args) => (Some(args.engine()), false),
        _ => (None, false),
    };
    engine::require_engine(engine, meets)?;
    options::require_threads_of_environment()?;
    let config = command.config();
    config.map_or(Ok(()), ConfigArgs::check)?;
    run_command(command)?;
    config.map_or(Ok(()), ConfigArgs::write)
}

fn run_command(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Plan(args) => plan::run(args),
        Command::Step(args) => step::run(args),
        Command::Train(args) => train::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Check(args) => check::run(args),
        Command::Checkpoint(args) => checkpoint::run(args),
        Command::Completions(args) => manual::complete(args),
        Command::Man(args) => manual::man(args),
    }
}
