//! `fusestep launch`: a program as several ranks of this machine.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use fusestep_collective::{ALONE_REMEDY, started_together};
use fusestep_collective_processes::{LaunchOptions, Launched, launch};

use crate::options::{MOST_RANKS, parse_timeout, whole};

/// Flags of `launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Number of processes
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize, 1, MOST_RANKS>)]
    ranks: usize,
    /// Seconds that ranks have to end after SIGINT, SIGTERM, SIGHUP or SIGQUIT, which are passed on
    /// to them, before they are killed; what ranks have started has as long from their end on
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_timeout)]
    patience: Duration,
    /// The program and its arguments; `--` before them is allowed
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Refuses to be started by a launcher: each of its ranks would start ranks of its own.
pub(crate) fn require_first() -> anyhow::Result<()> {
    let Some(started) = started_together() else {
        return Ok(());
    };
    bail!(
        "launch: expected no launcher around `fusestep launch`, found that {started}, and each \
         would start ranks of its own; start the program itself there, or `fusestep launch` \
         without the other launcher, or {ALONE_REMEDY}"
    );
}

/// Starts all ranks and waits for them; the exit code is that of the first rank that fails.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let Some((program, arguments)) = args.program.split_first() else {
        bail!("launch: expected a program, found none");
    };
    let options = LaunchOptions {
        arguments: arguments.to_vec(),
        patience: args.patience,
        ..LaunchOptions::new(args.ranks, program)
    };
    start(options)
}

/// Starts this very command as `ranks` processes, and ends as they end.
pub(crate) fn again(ranks: usize) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("cannot find this program to start it as ranks")?;
    let options = LaunchOptions {
        arguments: std::env::args_os().skip(1).collect(),
        ..LaunchOptions::new(ranks, own)
    };
    start(options)
}

fn start(options: LaunchOptions) -> anyhow::Result<()> {
    // This program itself, whatever lies at its path by now.
    let guard = Some("/proc/self/exe".into());
    match launch(&LaunchOptions { guard, ..options })? {
        Launched { failed: None, .. } => Ok(()),
        // The ranks have said why.
        Launched { code, .. } => std::process::exit(i32::from(code)),
    }
}
