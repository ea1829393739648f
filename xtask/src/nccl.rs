//! `nccl`: the collectives between GPUs, on the emulated driver and a stand-in for NCCL.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fusestep_cuda_emulator::{Nccl, Options, Sanitize, build, build_nccl};

use crate::mpi::build as cargo;
use crate::{parallel, workspace_root};

/// GPUs of the emulated machine, and so the largest world.
const DEVICES: &str = "4";

/// Builds the emulated driver and the stand-ins, then runs the suite and the command line's
/// self-test on them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = crate::emulate::split(arguments);
    ensure!(
        own.is_empty(),
        "expected `nccl [-- TEST ARGUMENTS]`, found {own:?}"
    );
    let root = workspace_root();
    let options = Options {
        sanitize: Sanitize::Off,
        ..Options::default()
    };
    let target = root.join("target");
    let driver = build(&root.join("kernels"), &target.join("emulator"), &options)?;
    let stand_in = |name: &str, nccl: Nccl| build_nccl(&target.join(name), nccl, &options);
    let libraries: [(&str, PathBuf); 4] = [
        ("FUSESTEP_CUDA_LIBRARY", driver),
        (
            "FUSESTEP_NCCL_LIBRARY",
            stand_in("nccl-stand-in", Nccl::Complete)?,
        ),
        (
            "FUSESTEP_NCCL_OLD_LIBRARY",
            stand_in("nccl-stand-in-old", Nccl::Old)?,
        ),
        (
            "FUSESTEP_NCCL_LACKING_LIBRARY",
            stand_in("nccl-stand-in-lacking", Nccl::WithoutConfig)?,
        ),
    ];
    let programs = cargo(
        "test",
        &["--no-run", "--lib", "--test=folder", "--test=nccl"],
    )?;
    // The library tests of the engine for MPI are those of `cargo xtask mpi`.
    let is_own = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with("fusestep_collective_mpi-")
    };
    // The last one is of ranks that have a device each.
    let own = programs.iter().filter(is_own).map(Some).chain([None]);
    let own: Vec<Option<&PathBuf>> = own.collect();
    // Side by side: ranks that wait for deadlines leave the cores to others.
    parallel::map(&own, |program| {
        let mut command = program.map_or_else(device_ranks, Command::new);
        command
            .args(test_arguments)
            .envs(libraries.iter().cloned())
            .env("FUSESTEP_EMULATOR_DEVICES", DEVICES);
        succeed(command)
    })?;
    if test_arguments.is_empty() {
        self_test(&libraries)?;
    }
    println!("nccl: all is well");
    Ok(())
}

/// Runs a program to its end, then prints what it said.
fn succeed(mut command: Command) -> Result<()> {
    let named = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot start {named}"))?;
    let text = [output.stdout, output.stderr].concat();
    print!("{}", String::from_utf8_lossy(&text));
    ensure!(output.status.success(), "failed: {named}");
    Ok(())
}

/// Whole steps of ranks with a device each: a program that is linked with the emulated driver.
fn device_ranks() -> Command {
    let folder = workspace_root().join("target/emulator");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(workspace_root())
        .args(["test", "--release", "--package", "fusestep-cli"])
        .args(["--features", "cuda,nccl", "--test", "device_ranks", "--"])
        .env("CUDA_LIBRARY_PATH", &folder)
        .env("LD_LIBRARY_PATH", folder.join("lib64"))
        .env("FUSESTEP_STAND_IN_EAGER", "1");
    command
}

/// `fusestep check` on the emulated GPUs, and on more than there are.
fn self_test(libraries: &[(&str, PathBuf)]) -> Result<()> {
    let programs = cargo("build", &["--bin=fusestep"])?;
    let fusestep = programs.first().context("cargo built no `fusestep`")?;
    let folders = libraries[..2].iter().filter_map(|(_, path)| path.parent());
    let path = std::env::join_paths(folders)?;
    for (engine, ranks, expected) in [
        ("nccl", "4", "every collective is right"),
        ("nccl-native", "2", "every collective is right"),
        ("nccl", "5", "rank 4 expected GPU 4, found 4 of them"),
    ] {
        let output = Command::new(fusestep)
            .args(["check", "--engine", engine, "--ranks", ranks])
            .env("LD_LIBRARY_PATH", &path)
            .env("FUSESTEP_EMULATOR_DEVICES", DEVICES)
            .output()
            .context("cannot start fusestep")?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        ensure!(
            text.contains(expected),
            "{engine} on {ranks} ranks: expected `{expected}`, found\n{text}"
        );
        println!("{}", text.trim_end());
    }
    // Ranks of the stand-in are threads, so that a process of its own is a world of one.
    let folder = std::env::temp_dir().join(format!("fusestep-nccl-meeting-{}", std::process::id()));
    let output = Command::new(fusestep)
        .args([
            "check", "--engine", "nccl", "--ranks", "1", "--rank", "0", "--meet",
        ])
        .arg(&folder)
        .env("LD_LIBRARY_PATH", &path)
        .env("FUSESTEP_EMULATOR_DEVICES", DEVICES)
        .output()
        .context("cannot start fusestep")?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    ensure!(
        text.contains("every collective is right") && !folder.exists(),
        "in a folder: expected `every collective is right` and no folder left, found\n{text}"
    );
    Ok(())
}
