//! `fusestep launch`: a program as several ranks of this machine.

use std::ffi::OsString;

use anyhow::{Context, bail};
use clap::Args;
use fusestep_collective_mpi::launched_ranks;
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

/// Refuses to be started by a launcher: each of its ranks would start ranks of its own.
pub(crate) fn require_first() -> anyhow::Result<()> {
    let by_mpirun = launched_ranks().filter(|ranks| *ranks > 1);
    let launcher = if by_mpirun.is_some() { "mpirun" } else { "RANK and WORLD_SIZE" };
    let Some(ranks) = by_mpirun.or_else(launched_processes) else {
        return Ok(());
    };
    bail!(
        "launch: expected no launcher around `fusestep launch`, found that of {ranks} ranks, as \
         {launcher} say, of which each would start ranks of its own; start the program itself \
         there, or `fusestep launch` without the other launcher"
    );
}

/// Starts all ranks and waits for them; the exit code is that of the first that fails.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
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
