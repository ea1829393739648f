//! `simulate`: whole training runs under seeds, with faults of ranks and disks.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::commands::{cargo, must};
use crate::{target_folder, workspace_root};

/// Seeds without a number given.
const SEEDS: u64 = 10_000;

/// Runs so many seeds, or the one that is to be looked at.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let number = |text: &String| {
        text.parse::<u64>().with_context(|| format!("expected a number, found {text:?}"))
    };
    let (first, count) = match arguments {
        [] => (0, SEEDS),
        [flag, count] if flag == "--seeds" => (0, number(count)?),
        [flag, seed] if flag == "--seed" => (number(seed)?, 1),
        _ => bail!("expected `simulate [--seeds N | --seed S]`, found {arguments:?}"),
    };
    let (first, count) = (first.to_string(), count.to_string());
    let root = workspace_root();
    // The command line is named for its dependencies: with them nothing is compiled a second time.
    let build = "build --release -q --bin simulate -p fusestep-testkit -p fusestep-cli";
    must(&mut cargo(build), "the simulator does not build")?;
    must(
        Command::new(target_folder().join("release/simulate"))
            .args([&first, &count])
            .current_dir(&root),
        "a promise was broken",
    )
}
