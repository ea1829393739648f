//! Development commands: `cargo xtask COMMAND`. One module per command; [`wheels`] fetches the
//! pinned compilers.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, process::ExitCode};

use anyhow::{Context, Result, bail};
use serde_json::Value;

mod arm;
mod benches;
mod book;
mod bundle;
mod candle_cuda;
mod commands;
mod emulate;
mod environment;
mod execute_ptx;
mod faults;
mod fences;
mod folders;
mod fuzz;
mod gpu;
mod machine_code;
mod manylinux;
mod mpi;
mod mpi_bench;
mod mpi_lanes;
mod mpi_victims;
mod mutants;
mod nccl;
mod nightly;
mod package;
mod pages;
mod parallel;
mod performance;
mod ptx;
mod ptxas;
mod python;
mod python_cuda;
mod python_free;
mod release;
mod sanitize;
mod sass;
mod simulate;
mod waves;
mod wheels;
#[cfg(test)]
mod workflows;

/// What there is, a command to a line.
const USAGE: &str =
    "  cargo xtask ptx [--check [--recorded]]   compile kernels/*.cu to kernels/ptx, assemble that to \
    kernels/machine_code and list registers, or compare with what is there
  cargo xtask emulate [--sanitize] [-- TEST ARGUMENTS]   build the emulated CUDA driver and run \
    the CUDA tests on it; needs no GPU
  cargo xtask candle-cuda [-- TEST ARGUMENTS]   candle's variables on the emulated CUDA device, \
    without candle's own kernels; needs no GPU and no nvcc
  cargo xtask execute-ptx [--all] [--seed N] [--counts] [--mutants [WORD...]] [-- TEST ARGUMENTS]   \
    run the CUDA tests on the PTX as shipped, instruction by instruction; needs no GPU
  cargo xtask waves   what the last blocks of a launch cost on an H100, for several lengths of \
    chunks; counts only
  cargo xtask benches   every command of benches that headers and pages name, each function once
  cargo xtask gpu [--bundle DIR] [-- RUN.SH ARGUMENTS]   the proof on this machine's GPU: tests, \
    sanitizers, times; or pack it for another one
  cargo xtask mpi [--bench]   run the collectives' tests between processes under mpirun, or time \
    them beside the MPI's own
  cargo xtask nccl [-- TEST ARGUMENTS]   run the collectives' tests between emulated GPUs, on a \
    stand-in for NCCL
  cargo xtask python [--bare | --lean | --free-threaded | --mpi | --trainers | --cuda | -- PYTEST \
    ARGUMENTS]   test the Python package beside the pinned PyTorch, under mpirun, in trainers, on \
    the emulated CUDA device, or its seam alone without PyTorch, of all rules or few, and in a \
    free-threaded interpreter
  cargo xtask wheel [--from-sdist]   build the Python package: a wheel and a source \
    distribution, and once more from that
  cargo xtask wheels [x86_64 | aarch64]   wheels for any Linux with glibc 2.17 or newer, linked \
    by Zig, and a source distribution
  cargo xtask simulate [--seeds N | --seed S]   whole training runs under seeds, with deaths, \
    stalls, lost power, full disks and rot
  cargo xtask faults   step, save, resume and reshard with an error or their death at every call \
    that changes a file
  cargo xtask fuzz [--seconds N] [--seed S]   any bytes as files, plans and launches, each \
    target of tools/fuzz for so long
  cargo xtask planted [WORD...]   put bugs into a copy of the sources, one after the other, and \
    see each found by the tool that is there for it
  cargo xtask nightly [WORD]   what takes longer than a change may wait for: kills, a million \
    seeds, sanitizers, features, licences, mutants
  cargo xtask package [--candle VERSION | --semver]   pack every public crate as for a registry, \
    and run programs that depend on nothing but what was packed
  cargo xtask release --dry-run [--quick]   whether versions, changelog, licences, packages, \
    wheels and book are ready, and the commands that publish them, in order
  cargo xtask pages   type the programs of README, docs/start and docs/guides into empty folders \
    and run them; those in Python where `cargo xtask python` has put PyTorch
  cargo xtask performance [--check]   pages of docs/performance from the measurements of \
    benches/results, or whether they are those
  cargo xtask book   the pages of docs/ under one menu, into target/book, with links and anchors \
    checked
  cargo xtask arm [--short] [-- TEST ARGUMENTS]   run the tests of loops and rules, and of what \
    puts them together, built for ARM on an emulated processor
  cargo xtask sanitize thread|address [-- TEST ARGUMENTS]   run the tests of what threads share \
    under a sanitizer of the compiler";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else {
        bail!("a command is missing; there are\n{USAGE}");
    };
    if let Some("--help" | "-h") = rest.first().map(String::as_str) {
        println!("{}", help_of(name)?);
        return Ok(());
    }
    find_target_folder()?;
    match name.as_str() {
        "help" | "--help" | "-h" => {
            println!("{USAGE}");
            Ok(())
        }
        "arm" => arm::run(rest),
        "ptx" => ptx::run(rest),
        "emulate" => emulate::run(rest),
        "candle-cuda" => candle_cuda::run(rest),
        "execute-ptx" => execute_ptx::run(rest),
        "benches" => benches::run(rest),
        "waves" => waves::run(rest),
        "gpu" => gpu::run(rest),
        "mpi" => mpi::run(rest),
        "nccl" => nccl::run(rest),
        "python" => python::run(rest),
        "wheel" => python::wheel(rest),
        "simulate" => simulate::run(rest),
        "faults" => faults::run(rest),
        "fuzz" => fuzz::run(rest),
        "planted" => mutants::planted::run(rest),
        "nightly" => nightly::run(rest),
        "package" => package::run(rest),
        "release" => release::run(rest),
        "wheels" => manylinux::run(rest),
        "performance" => performance::run(rest),
        "pages" => pages::run(rest),
        "book" => book::run(rest),
        "sanitize" => sanitize::run(rest),
        _ => bail!("`{name}` is no command; there are\n{USAGE}"),
    }
}

/// The lines of one command, and for those that run mutants what both do.
fn help_of(name: &str) -> Result<String> {
    let mut commands =
        USAGE.split("\n  cargo xtask ").map(|text| text.trim_start_matches("  cargo xtask "));
    let found = commands.find(|text| text.split_whitespace().next() == Some(name));
    let found = found.with_context(|| format!("`{name}` is no command; there are\n{USAGE}"))?;
    let more = match name {
        "planted" | "execute-ptx" => format!("\n\n{}", mutants::HELP),
        _ => String::new(),
    };
    Ok(format!("  cargo xtask {found}{more}"))
}

/// The folder of the workspace's `Cargo.toml`.
fn workspace_root() -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).expect("xtask lies two folders below the workspace").to_path_buf()
}

/// Where cargo builds, which variables and settings of the machine may say.
static TARGET: OnceLock<PathBuf> = OnceLock::new();

/// Asks cargo where it builds, and makes that folder.
fn find_target_folder() -> Result<()> {
    let text = commands::cargo("metadata --no-deps --offline --format-version 1").output()?;
    let metadata: Value = serde_json::from_slice(&text.stdout)
        .context("cargo tells nothing of this workspace; `cargo metadata` says why")?;
    let folder = metadata["target_directory"].as_str().context("cargo names no target folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {folder}"))?;
    let _ = TARGET.set(folder.into());
    Ok(())
}

/// The folder that cargo builds into, in which all that is made here lies, too.
fn target_folder() -> &'static Path {
    TARGET.get().expect("every command begins by asking cargo for it")
}
