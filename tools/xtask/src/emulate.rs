//! `emulate`: the CUDA tests on a driver that needs no GPU.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use fusestep_cuda_emulator::{Options, Sanitize, build};

use crate::commands::{cargo, host, must};
use crate::{target_folder, workspace_root};

/// Builds the emulator into `target/emulator` and runs the CUDA tests on it.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = split(arguments);
    let sanitize = match own {
        [] => Sanitize::Off,
        [flag] if flag == "--sanitize" => Sanitize::AddressAndUndefined,
        _ => bail!("expected `emulate [--sanitize] [-- TEST ARGUMENTS]`, found {own:?}"),
    };
    let root = workspace_root();
    let name = match sanitize {
        Sanitize::Off => "emulator",
        Sanitize::AddressAndUndefined => "emulator-sanitized",
    };
    let folder = target_folder().join(name);
    let options = Options { sanitize, ..Options::default() };
    let library = build(&root.join("kernels"), &folder, &options)?;
    println!("emulator: {}", library.display());
    let mut environment = vec![("CUDA_LIBRARY_PATH".into(), folder.clone().into_os_string())];
    match sanitize {
        Sanitize::Off => {
            environment.push(("LD_LIBRARY_PATH".into(), folder.join("lib64").into()));
        }
        Sanitize::AddressAndUndefined => {
            environment.push(runner(&folder, &options)?);
        }
    }
    test(&environment, test_arguments)
}

/// What stands before and behind `--`.
pub(crate) fn split(arguments: &[String]) -> (&[String], &[String]) {
    match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (&arguments[..at], &arguments[at + 1..]),
        None => (arguments, &[]),
    }
}

/// Tests that reach the CUDA backend: its own, and the laws, which run on every backend of the
/// testkit's runner.
///
/// The command line is named for its dependencies: with them, what these tests are built on has the
/// features that it has in `cargo test --release`, and is not compiled a second time.
pub(crate) const SUITE: &str = "--release --package fusestep-cuda --package fusestep-tests --package \
                     fusestep-cli --features fusestep-cuda/cuda,fusestep-testkit/cuda --lib --test \
                     emulated --test every_entry --test faults --test measured --test normed --test \
                     resident --test timing --test laws";

/// Runs the CUDA tests, with `environment` for this command only.
fn test(environment: &[(OsString, OsString)], test_arguments: &[String]) -> Result<()> {
    let mut command = cargo(&format!("test {SUITE} --"));
    command.args(test_arguments).envs(environment.iter().cloned());
    must(&mut command, &format!("the CUDA tests failed: cargo test {SUITE}"))
}

/// The variable that makes cargo start test programs, and nothing else, with the sanitizer loaded
/// first.
fn runner(folder: &Path, options: &Options) -> Result<(OsString, OsString)> {
    let output = Command::new(options.compiler())
        .arg("-print-file-name=libasan.so")
        .output()
        .context("cannot ask the C++ compiler for libasan.so")?;
    let asan = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    ensure!(
        asan.is_absolute(),
        "the C++ compiler has no libasan.so; install its sanitizer libraries"
    );
    let name = format!("CARGO_TARGET_{}_RUNNER", host()?.replace('-', "_").to_uppercase());
    // Leaks are not looked for: a fault leaves device memory behind, as on a device.
    let value = format!(
        "env ASAN_OPTIONS=detect_leaks=0 LD_LIBRARY_PATH={} LD_PRELOAD={}",
        folder.join("lib64").display(),
        asan.display()
    );
    Ok((name.into(), value.into()))
}
