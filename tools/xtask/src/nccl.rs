//! `nccl`: the collectives between GPUs, on the emulated driver and a stand-in for NCCL.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fusestep_cuda_emulator::{Nccl, Options, Sanitize, build, build_nccl};

use crate::commands::{cargo, named, output};
use crate::mpi;
use crate::{parallel, target_folder, workspace_root};

/// GPUs of the emulated machine, and so the largest world.
const DEVICES: &str = "4";

/// Builds the emulated driver and the stand-ins, then runs the suite and the command line's
/// self-test on them.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, test_arguments) = crate::emulate::split(arguments);
    ensure!(own.is_empty(), "expected `nccl [-- TEST ARGUMENTS]`, found {own:?}");
    let root = workspace_root();
    let options = Options { sanitize: Sanitize::Off, ..Options::default() };
    let target = target_folder();
    let driver = build(&root.join("kernels"), &target.join("emulator"), &options)?;
    let stand_in = |name: &str, nccl: Nccl| build_nccl(&target.join(name), nccl, &options);
    let libraries: [(&str, PathBuf); 4] = [
        ("FUSESTEP_CUDA_LIBRARY", driver),
        ("FUSESTEP_NCCL_LIBRARY", stand_in("nccl-stand-in", Nccl::Complete)?),
        ("FUSESTEP_NCCL_OLD_LIBRARY", stand_in("nccl-stand-in-old", Nccl::Old)?),
        ("FUSESTEP_NCCL_LACKING_LIBRARY", stand_in("nccl-stand-in-lacking", Nccl::WithoutConfig)?),
    ];
    let programs = mpi::build("test", &["--no-run", "--lib", "--test=folder", "--test=nccl"])?;
    // The library tests of the engine for MPI are those of `cargo xtask mpi`.
    let own = programs
        .iter()
        .filter(|program| program.name != "fusestep_collective_mpi")
        .map(|program| Some(&program.path));
    // The last one is of ranks that have a device each.
    let own: Vec<Option<&PathBuf>> = own.chain([None]).collect();
    // Side by side: ranks that wait for deadlines leave the cores to others.
    parallel::map(&own, |program| {
        let mut command = program.map_or_else(device_ranks, Command::new);
        command
            .args(test_arguments)
            .envs(libraries.iter().cloned())
            .env("FUSESTEP_EMULATOR_DEVICES", DEVICES);
        print!("{}", output(&mut command)?);
        Ok(())
    })?;
    if test_arguments.is_empty() {
        self_test(&libraries)?;
    }
    println!("nccl: all is well");
    Ok(())
}

/// Whole steps of ranks with a device each: a program that is linked with the emulated driver.
fn device_ranks() -> Command {
    let folder = target_folder().join("emulator");
    let package = "--package fusestep-cli --features cuda,nccl";
    let mut command = cargo(&format!("test --release {package} --test device_ranks --"));
    command
        .env("CUDA_LIBRARY_PATH", &folder)
        .env("LD_LIBRARY_PATH", folder.join("lib64"))
        .env("FUSESTEP_STAND_IN_EAGER", "1");
    command
}

/// `fusestep check` on the emulated GPUs, and on more than there are.
fn self_test(libraries: &[(&str, PathBuf)]) -> Result<()> {
    let programs = mpi::build("build", &["--bin=fusestep"])?;
    let fusestep = named(&programs, "fusestep")?;
    let folders = libraries[..2].iter().filter_map(|(_, path)| path.parent());
    let path = std::env::join_paths(folders)?;
    let check = |arguments: &[&str], expected: &str| -> Result<()> {
        let mut command = Command::new(fusestep);
        command
            .args(["check", "--engine"])
            .args(arguments)
            .env("LD_LIBRARY_PATH", &path)
            .env("FUSESTEP_EMULATOR_DEVICES", DEVICES);
        let output = command.output().context("cannot start fusestep")?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        ensure!(text.contains(expected), "{arguments:?}: expected `{expected}`, found\n{text}");
        println!("{}", text.trim_end());
        Ok(())
    };
    let right = "every collective is right";
    check(&["nccl", "--ranks", "4"], right)?;
    check(&["nccl-native", "--ranks", "2"], right)?;
    let more = "rank 4 expected GPU 4, found 4 of them";
    check(&["nccl", "--ranks", "5"], more)?;
    // Ranks of the stand-in are threads, so that a process of its own is a world of one.
    let folder = std::env::temp_dir().join(format!("fusestep-nccl-meeting-{}", std::process::id()));
    let meet = folder.to_string_lossy();
    let alone = ["nccl", "--ranks", "1", "--rank", "0", "--meet", &meet];
    check(&alone, right)?;
    ensure!(!folder.exists(), "expected no folder left, found {}", folder.display());
    Ok(())
}
