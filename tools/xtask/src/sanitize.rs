//! `sanitize`: the tests of what threads share, under the sanitizers of the compiler.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::commands::{cargo, host, must, output};
use crate::target_folder;

/// What runs under both sanitizers, as cargo's arguments: whatever threads share, and the
/// collectives between them whole.
const SHARED: [&str; 2] = [
    "--package fusestep-simd --package fusestep-collective --package fusestep-cpu --lib",
    "--package fusestep-collective --test collective",
];

/// What runs under the address sanitizer besides: memory that is mapped, cut up or handed to C++.
const MEMORY: &str = "--package fusestep-coalesce --package fusestep-launch --lib";

/// Builds the suites for a sanitizer and runs them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = crate::emulate::split(arguments);
    let sanitizer = match own {
        [name] if name == "thread" || name == "address" => name,
        _ => bail!("expected `sanitize thread|address [-- TEST ARGUMENTS]`, found {own:?}"),
    };
    let flags = format!("-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer");
    // The thread sanitizer must see the locks of the standard library, or it takes what they guard
    // for races. The address sanitizer is content with the library that comes with the
    // compiler.
    let std: &[&str] = if sanitizer == "thread" { &["-Zbuild-std"] } else { &[] };
    if !std.is_empty() {
        require_sources()?;
    }
    // Beside the ordinary build, whose crates carry no sanitizer.
    let target = target_folder().join(format!("sanitize-{sanitizer}"));
    let more = (sanitizer == "address").then_some(MEMORY);
    for suite in SHARED.into_iter().chain(more) {
        let begun = Instant::now();
        let mut command = cargo(&format!("test --release --target {} {suite}", host()?));
        command
            .args(std)
            .arg("--target-dir")
            .arg(&target)
            // One test at a time, in the thread that started: the test runner's own threads are not
            // what is looked at.
            .args(["--", "--test-threads=1"])
            // It covers code of other tests with ten times the elements; the thread sanitizer takes
            // more than five minutes for it.
            .args(["--skip", "a_million_and_one"])
            .args(test_arguments)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", &flags);
        must(&mut command, &format!("under the {sanitizer} sanitizer failed: {suite}"))?;
        println!("sanitize {sanitizer}: {suite} in {:.0} s", begun.elapsed().as_secs_f64());
    }
    println!("sanitize {sanitizer}: all is well");
    Ok(())
}

/// Installs the standard library's sources, if they are not there.
fn require_sources() -> Result<()> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let sysroot = PathBuf::from(sysroot.trim());
    if sysroot.join("lib/rustlib/src/rust/library/std").is_dir() {
        return Ok(());
    }
    must(
        Command::new("rustup").args(["component", "add", "rust-src"]),
        "the thread sanitizer takes the standard library's sources: rustup component add rust-src",
    )
}
