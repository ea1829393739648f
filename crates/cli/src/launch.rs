//! `fusestep launch`: a program as several ranks of this machine.

use std::ffi::OsString;

use anyhow::{Context, bail, ensure};
use clap::Args;
use fusestep_collective_processes::{LaunchOptions, Launched, launch, launched_processes};

use crate::ranks::{MOST_RANKS, whole};

/// Flags of `launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// How many processes
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    ranks: usize,
    /// The program and its arguments, behind `--`
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Starts all ranks and waits for them; the exit code is that of the first that fails.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    ensure!(
        launched_processes().is_none(),
        "expected to be the first launcher, found RANK and WORLD_SIZE of another one"
    );
    let Some((program, arguments)) = args.program.split_first() else {
        bail!("expected a program behind `--`, found none");
    };
    let options =
        LaunchOptions { arguments: arguments.to_vec(), ..LaunchOptions::new(args.ranks, program) };
    start(&options)
}

/// Starts this very command as so many ranks, and does in its name what they do.
pub(crate) fn again(ranks: usize) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("cannot find this program to start it as ranks")?;
    let options = LaunchOptions {
        arguments: std::env::args_os().skip(1).collect(),
        ..LaunchOptions::new(ranks, own)
    };
    start(&options)
}

fn start(options: &LaunchOptions) -> anyhow::Result<()> {
    let program = options.program.to_string_lossy();
    let ended = launch(options).with_context(|| format!("cannot start {program}"))?;
    match ended {
        Launched { failed: None, .. } => Ok(()),
        // The ranks have said why.
        Launched { code, .. } => std::process::exit(i32::from(code)),
    }
}
