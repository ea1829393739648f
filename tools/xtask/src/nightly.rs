//! `nightly`: what takes longer than a change may wait for, one after the other, and a table of how
//! each ended.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{cargo, must};
use crate::{target_folder, workspace_root};

/// A check: its name, the tools of cargo that it needs, variables and the command.
struct Check {
    name: &'static str,
    needs: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
    /// Words with a space between them.
    command: &'static str,
}

/// Takes no tool and no variable.
const PLAIN: Check = Check { name: "", needs: &[], variables: &[], command: "" };

const CHECKS: &[Check] = &[
    Check {
        name: "200 kills of a run that saves, each resumed to the same parameters",
        command: "cargo test --release -p fusestep-cli --test cli -- --ignored --exact \
                  checkpoints::a_run_killed_at_200_instants_resumes_to_the_same_parameters",
        ..PLAIN
    },
    // With the program, so that features are those of the other checks and little is built anew.
    Check {
        name: "100 kills of candle's saves behind training, each resumed",
        command: "cargo test --release -p fusestep-candle -p fusestep-cli --test ranks -- \
                  --ignored --exact \
                  kills::a_run_killed_100_times_within_saves_behind_resumes_to_the_same_parameters",
        ..PLAIN
    },
    Check { name: "a million seeds", command: "cargo xtask simulate --seeds 1000000", ..PLAIN },
    Check {
        name: "ten minutes of each fuzz target",
        command: "cargo xtask fuzz --seconds 600",
        ..PLAIN
    },
    Check { name: "planted bugs", command: "cargo xtask planted", ..PLAIN },
    Check {
        name: "thread sanitizer",
        needs: &[],
        variables: &[(COMPILER, "nightly")],
        command: "cargo xtask sanitize thread",
    },
    Check {
        name: "address sanitizer",
        needs: &[],
        variables: &[(COMPILER, "nightly")],
        command: "cargo xtask sanitize address",
    },
    Check {
        name: "tests with checks of overflow and debug assertions",
        needs: &[],
        variables: &[
            ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true"),
            ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"),
            ("CARGO_TARGET_DIR", "target/checked"),
        ],
        command: "cargo test --release",
    },
    Check {
        name: "oldest compiler of the crates",
        needs: &[],
        variables: &[(COMPILER, "1.89"), ("CARGO_TARGET_DIR", "target/oldest")],
        command: "cargo check --release --workspace --exclude fusestep-candle --exclude \
                  fusestep-cli",
    },
    Check {
        name: "oldest compiler of candle and the program",
        needs: &[],
        variables: &[(COMPILER, "1.94"), ("CARGO_TARGET_DIR", "target/oldest")],
        command: "cargo check --release -p fusestep-candle -p fusestep-cli",
    },
    // The lock file holds the newest.
    Check {
        name: "oldest release of candle",
        command: "cargo xtask package --candle 0.11.0",
        ..PLAIN
    },
    Check {
        name: "semver of the public crates",
        needs: &["cargo-semver-checks"],
        variables: &[],
        command: "cargo xtask package --semver",
    },
    Check {
        name: "licences, sources and advisories",
        needs: &["cargo-deny"],
        variables: &[],
        command: "cargo deny --workspace check",
    },
    Check {
        name: "the Python package in trainers",
        command: "cargo xtask python --trainers",
        ..PLAIN
    },
    Check {
        name: "a Python extension of two rules",
        command: "cargo xtask python --lean",
        ..PLAIN
    },
    Check {
        name: "the Python seam in a free-threaded interpreter",
        command: "cargo xtask python --free-threaded",
        ..PLAIN
    },
    Check { name: "loops and rules on an emulated ARM", command: "cargo xtask arm", ..PLAIN },
    Check {
        name: "mutants of kernels on the emulator",
        command: "cargo xtask emulate -- mutants_that",
        ..PLAIN
    },
    Check { name: "candle on the emulated device", command: "cargo xtask candle-cuda", ..PLAIN },
    Check {
        name: "spans of a rank's step",
        command: "cargo test --release -p fusestep --features tracing --test spans",
        ..PLAIN
    },
    // Candle's only feature is `cuda`, whose kernels take nvcc: `cargo xtask candle-cuda` builds it
    // beside a toolkit of its own, and every other check builds the crate without it.
    Check {
        name: "each feature alone",
        needs: &["cargo-hack"],
        variables: &[("DOCS_RS", "1"), ("CARGO_TARGET_DIR", "target/docs-rs")],
        command: "cargo hack check --workspace --exclude fusestep-candle --each-feature --no-dev-deps",
    },
    Check {
        name: "mutants of layouts and launches",
        needs: &["cargo-mutants"],
        variables: &[],
        command: "cargo mutants --profile mutants --package fusestep-coalesce --package fusestep-launch --cargo-test-arg=--lib --cargo-test-arg=--tests --output target/mutants-launch --no-shuffle",
    },
    // The baseline would look for these tests in the package of the mutants. A mutant that is found
    // costs no more than until the first test that finds it, for each test is a process of its own.
    Check {
        name: "mutants of the passes",
        needs: &["cargo-mutants", "cargo-nextest"],
        variables: &[],
        command: "cargo mutants --profile mutants --package fusestep-planner --file crates/planner/src/plan/passes/*.rs --test-package fusestep-tests --baseline skip --timeout 300 --test-tool nextest --output target/mutants-passes --no-shuffle -- --test plans --test amp --test distributed",
    },
];

/// The variable that chooses a compiler.
const COMPILER: &str = "RUSTUP_TOOLCHAIN";

/// Runs all checks, or those whose name contains a word; a check that fails does not keep the
/// others from running.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let word = match arguments {
        [] => "",
        [word] => word,
        _ => bail!("expected `nightly [WORD]`, found {arguments:?}"),
    };
    let checks: Vec<&Check> = CHECKS.iter().filter(|check| check.name.contains(word)).collect();
    ensure!(!checks.is_empty(), "no check is called {word:?}");
    let mut table = String::from("| Check | Command | End | Seconds |\n|---|---|---|---|\n");
    let mut failed = 0;
    for check in checks {
        let begun = Instant::now();
        let end = match ended(check) {
            Ok(()) => "passed".to_owned(),
            Err(error) => {
                failed += 1;
                format!("{error:#}")
            }
        };
        let seconds = begun.elapsed().as_secs();
        let (name, command) = (check.name, check.command);
        table += &format!("| {name} | `{command}` | {end} | {seconds} |\n");
        println!("nightly: {name}: {end}, {seconds} s");
    }
    print!("\n{table}");
    ensure!(failed == 0, "{failed} checks did not pass");
    Ok(())
}

fn ended(check: &Check) -> Result<()> {
    let root = workspace_root();
    for tool in check.needs {
        install(tool)?;
    }
    for (variable, compiler) in check.variables {
        if *variable == COMPILER {
            install_compiler(compiler)?;
        }
    }
    let mut words = check.command.split(' ');
    let program = words.next().context("no command")?;
    let tools = target_folder().join("tools/bin");
    let path = std::env::var("PATH").unwrap_or_default();
    let status = Command::new(program)
        .args(words)
        .current_dir(&root)
        .env("PATH", format!("{}:{path}", tools.display()))
        .envs(check.variables.iter().copied())
        .status()
        .with_context(|| format!("cannot start {program}"))?;
    ensure!(status.success(), "ended with {status}");
    Ok(())
}

/// Builds a tool once, beside what is built here.
fn install(tool: &str) -> Result<()> {
    let tools = target_folder().join("tools");
    if tools.join("bin").join(tool).exists() {
        return Ok(());
    }
    let mut command = cargo("install --locked --root");
    must(command.arg(&tools).arg(tool), &format!("cannot install {tool}"))
}

/// Asks for a compiler that is not there yet.
fn install_compiler(compiler: &str) -> Result<()> {
    let rustup = |arguments: &[&str]| Command::new("rustup").args(arguments).status();
    if rustup(&["run", compiler, "rustc", "--version"])?.success() {
        return Ok(());
    }
    let status = rustup(&["toolchain", "install", "--profile", "minimal", compiler])?;
    ensure!(status.success(), "cannot install the compiler {compiler}");
    Ok(())
}
