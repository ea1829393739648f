//! `fusestep launch`: a program as several ranks of this machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use fusestep_collective::started_together;
use fusestep_collective_processes::{LaunchOptions, Launched, Prefix, launch};

use crate::options::{MOST_RANKS, parse_timeout, whole};
use crate::output::{did_write, note, say};
use crate::places::make_folder;

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
    /// Begin each line that a rank prints with the rank: `[rank 3] `
    #[arg(long)]
    prefix: bool,
    /// Folder in which each rank's output goes to a file `rank-N.log`; with --prefix it is printed,
    /// too
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
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
         without the other launcher, or set FUSESTEP_ALONE=1 where each process is to start ranks \
         of its own; or, if no launcher runs, `unset {}`",
        started.variable
    );
}

/// Starts all ranks and waits for them; the exit code is that of the first rank that fails.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let Some((program, arguments)) = args.program.split_first() else {
        bail!("launch: expected a program, found none");
    };
    if let Some(folder) = &args.log_dir {
        make_folder("--log-dir", folder)?;
    }
    let did = args.log_dir.as_ref().map_or("wrote", |folder| did_write(&folder.join("rank-0.log")));
    let options = LaunchOptions {
        arguments: arguments.to_vec(),
        patience: args.patience,
        prefix: if args.prefix { Prefix::Rank } else { Prefix::None },
        log_folder: args.log_dir.clone(),
        ..LaunchOptions::new(args.ranks, program)
    };
    let launched = start(options)?;
    if let Launched { failed: Some(rank), code, .. } = launched {
        say(&ended(rank, code, args.log_dir.as_deref()));
        std::process::exit(i32::from(code));
    }
    if let Some(folder) = &args.log_dir {
        note(&format!("{did} {}/rank-0.log to rank-{}.log", folder.display(), args.ranks - 1));
    }
    if !launched.met && args.ranks > 1 {
        note(&format!(
            "note: the {} ranks have not met by the engine `processes`, and each ran alone unless \
             the program has another way; ranks of `fusestep train` meet with --engine processes, \
             and ranks that are threads need no launcher: --ranks {}",
            args.ranks, args.ranks
        ));
    }
    Ok(())
}

/// Starts this very command as `ranks` processes, and ends as they end.
pub(crate) fn again(ranks: usize) -> anyhow::Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match start_again(ranks, &arguments)? {
        None => Ok(()),
        Some(code) => std::process::exit(i32::from(code)),
    }
}

/// Starts this program with `arguments` as `ranks` processes; returns the exit code of the first
/// that has failed.
pub(crate) fn start_again(ranks: usize, arguments: &[OsString]) -> anyhow::Result<Option<u8>> {
    let own = std::env::current_exe().context("cannot find this program to start it as ranks")?;
    let options = LaunchOptions { arguments: arguments.to_vec(), ..LaunchOptions::new(ranks, own) };
    match start(options)? {
        Launched { failed: None, .. } => Ok(None),
        Launched { failed: Some(rank), code, .. } => {
            // A rank that ends by itself has said why.
            if code > SIGNAL {
                say(&ended(rank, code, None));
            }
            Ok(Some(code))
        }
    }
}

/// Exit codes above this one are those of signals.
const SIGNAL: u8 = 128;

/// A sentence on the rank that has failed first.
fn ended(rank: usize, code: u8, logs: Option<&Path>) -> String {
    let signal = code.checked_sub(SIGNAL).filter(|signal| *signal > 0);
    let signal = signal.map_or_else(String::new, |signal| format!(" (signal {signal})"));
    let log = logs.map_or_else(String::new, |folder| {
        format!("; it has printed {}/rank-{rank}.log", folder.display())
    });
    format!(
        "error: rank {rank} ended with exit code {code}{signal}; where one rank fails, the others \
         are ended, too{log}"
    )
}

fn start(options: LaunchOptions) -> anyhow::Result<Launched> {
    // This program itself, whatever lies at its path by now.
    let guard = Some("/proc/self/exe".into());
    Ok(launch(&LaunchOptions { guard, ..options })?)
}
