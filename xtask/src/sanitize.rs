//! `sanitize`: the tests of what threads share, under the sanitizers of the compiler.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace_root;

/// What runs under a sanitizer: cargo's arguments, then the tests' own. Long tests of numbers are left out; they share nothing
/// that shorter ones do not.
const SUITES: [(&[&str], &[&str]); 3] = [
    (&["--package", "fusestep-simd", "--lib"], &[]),
    (
        &[
            "--package",
            "fusestep-collective",
            "--package",
            "fusestep-cpu",
            "--lib",
        ],
        &[],
    ),
    (
        &["--package", "fusestep-tests", "--test", "collective"],
        &[],
    ),
];

/// Builds the suites for a sanitizer and runs them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = crate::emulate::split(arguments);
    let sanitizer = match own {
        [name] if name == "thread" || name == "address" => name,
        _ => bail!("expected `sanitize thread|address [-- TEST ARGUMENTS]`, found {own:?}"),
    };
    let version = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("cannot start rustc")?;
    let version = String::from_utf8(version.stdout)?;
    let host = version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("rustc names no host")?;
    // The standard library is the one that comes with the compiler, without the sanitizer in it.
    let flags = format!("-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer");
    let root = workspace_root();
    for (suite, own) in SUITES {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let status = Command::new(cargo)
            .current_dir(&root)
            .args(["test", "--release", "--target", host])
            .args(suite)
            .arg("--target-dir")
            .arg(root.join("target").join(format!("sanitize-{sanitizer}")))
            .arg("--")
            .args(own)
            .args(test_arguments)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", &flags)
            .env(
                "TSAN_OPTIONS",
                format!(
                    "halt_on_error=1 suppressions={}",
                    root.join("xtask/thread-sanitizer.txt").display()
                ),
            )
            .status()
            .context("cannot start cargo")?;
        ensure!(
            status.success(),
            "under the {sanitizer} sanitizer failed: {}",
            suite.join(" ")
        );
    }
    println!("sanitize {sanitizer}: all is well");
    Ok(())
}
