//! `fuzz`: every target of `tools/fuzz`, two at a time, with bounded memory.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{cargo, must};
use crate::{parallel, target_folder};

/// Seconds for each target without a number given.
const SECONDS: u64 = 60;

/// Most memory of a target, in KiB: an input of 64 KiB that asks for more than this breaks a
/// promise.
const MEMORY_KIB: u64 = 4 << 20;

/// The targets, a slow one and a fast one by turns.
const TARGETS: [&str; 10] = [
    "state",
    "tensor_file",
    "plan",
    "shapes",
    "packing",
    "manifest",
    "mark",
    "journal",
    "shards",
    "codes",
];

/// Targets that run at a time.
const AT_A_TIME: usize = 2;

/// Runs every target for so many seconds from a seed.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (mut seconds, mut seed) = (SECONDS, 0);
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else {
            bail!("{}: expected a number", pair[0]);
        };
        let value: u64 =
            value.parse().with_context(|| format!("{flag}: expected a number, found {value:?}"))?;
        match flag.as_str() {
            "--seconds" => seconds = value,
            "--seed" => seed = value,
            _ => bail!("expected `fuzz [--seconds N] [--seed S]`, found {flag:?}"),
        }
    }
    // The command line for its dependencies: with them nothing is compiled a second time.
    must(
        &mut cargo("build --release -q --bin fusestep-fuzz -p fusestep-fuzz -p fusestep-cli"),
        "the targets do not build",
    )?;
    let program = target_folder().join("release/fusestep-fuzz");
    let kept = parallel::map_on(AT_A_TIME, &TARGETS, |target| {
        Ok(fuzzed(&program, target, seconds, seed).unwrap_or(false))
    })?;
    let broken = TARGETS.iter().zip(kept).filter(|(_, kept)| !kept);
    let broken: Vec<_> = broken.map(|(target, _)| target).collect();
    ensure!(broken.is_empty(), "promises were broken: {broken:?}");
    Ok(())
}

fn fuzzed(program: &Path, target: &str, seconds: u64, seed: u64) -> Result<bool> {
    let status = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\""))
        .arg(program)
        .args([target, &seconds.to_string(), &seed.to_string()])
        .status()?;
    Ok(status.success())
}
