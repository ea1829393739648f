//! `arm`: the tests of what computes, built for ARM and run on an emulated processor, so that the
//! loops for NEON are held to the same bits as all others.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::commands::{cargo, must, output};
use crate::target_folder;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// What links and runs programs for it, and the packages that have them.
const LINKER: &str = "aarch64-linux-gnu-gcc";
const RUNNER: &str = "qemu-aarch64 -L /usr/aarch64-linux-gnu";
const PACKAGES: &str = "apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross";

/// What runs, as cargo's arguments: loops, then rules beside references and others' numbers.
const SHORT: [&str; 2] = [
    "--package fusestep-simd --package fusestep-elementwise --lib",
    "--package fusestep-tests --test amp --test fused_adam --test fused_sgd --test lars_momentum \
     --test lamb --test lion --test adagrad --test adamax --test nadam --test rmsprop \
     --test schedule_free --test precision",
];

/// What puts them together.
const MORE: [&str; 2] = [
    "--package fusestep-cpu --package fusestep-coalesce --package fusestep-collective \
     --package fusestep-planner --lib",
    "--package fusestep-tests --test coalesce --test laws --test plans --test trust",
];

/// Builds the tests and runs them; `--short` those of loops and rules alone.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = crate::emulate::split(arguments);
    let more: &[&str] = match own {
        [] => &MORE,
        [flag] if flag == "--short" => &[],
        _ => bail!("expected `arm [--short] [-- TEST ARGUMENTS]`, found {own:?}"),
    };
    for program in [LINKER, "qemu-aarch64"] {
        output(Command::new(program).arg("--version"))
            .with_context(|| format!("arm takes {program}, which `{PACKAGES}` installs"))?;
    }
    must(
        Command::new("rustup").args(["target", "add", TARGET]),
        "the standard library for ARM is not there; `rustup target add` says why",
    )?;
    for suite in SHORT.iter().chain(more) {
        let begun = Instant::now();
        let mut command = cargo(&format!("test --release --target {TARGET} {suite}"));
        command
            .arg("--target-dir")
            .arg(target_folder().join("arm"))
            .arg("--")
            .args(test_arguments)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", RUNNER);
        must(&mut command, &format!("on ARM failed: {suite}"))?;
        println!("arm: {suite} in {:.0} s", begun.elapsed().as_secs_f64());
    }
    println!("arm: all is well");
    Ok(())
}
