//! Development commands: `cargo xtask COMMAND`. One module per command; [`wheels`] fetches the
//! pinned compilers.
#![forbid(unsafe_code)]

use std::{env, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};

mod bundle;
mod candle_cuda;
mod commands;
mod emulate;
mod execute_ptx;
mod faults;
mod folders;
mod fuzz;
mod gpu;
mod machine_code;
mod mpi;
mod mpi_bench;
mod mpi_victims;
mod nccl;
mod nightly;
mod package;
mod parallel;
mod planted;
mod ptx;
mod ptxas;
mod python;
mod sanitize;
mod sass;
mod simulate;
mod waves;
mod wheels;

/// A command: its name, what it does in one line, and its entry.
struct Command {
    name: &'static str,
    usage: &'static str,
    run: fn(&[String]) -> Result<()>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "ptx",
        usage: "ptx [--check]   compile kernels/*.cu to kernels/ptx, assemble that to \
                kernels/machine_code and list registers, or compare with what is there",
        run: ptx::run,
    },
    Command {
        name: "emulate",
        usage: "emulate [--sanitize] [-- TEST ARGUMENTS]   build the emulated CUDA driver and run \
                the CUDA tests on it; needs no GPU",
        run: emulate::run,
    },
    Command {
        name: "candle-cuda",
        usage: "candle-cuda [-- TEST ARGUMENTS]   candle's variables on the emulated CUDA device, \
                without candle's own kernels; needs no GPU and no nvcc",
        run: candle_cuda::run,
    },
    Command {
        name: "execute-ptx",
        usage: "execute-ptx [--all] [--seed N] [--counts] [--mutants] [-- TEST ARGUMENTS]   run \
                the CUDA tests on the PTX as shipped, instruction by instruction; needs no GPU",
        run: execute_ptx::run,
    },
    Command {
        name: "waves",
        usage: "waves   what the last blocks of a launch cost on an H100, for several lengths of \
                chunks; counts only",
        run: waves::run,
    },
    Command {
        name: "gpu",
        usage: "gpu [--bundle DIR] [-- RUN.SH ARGUMENTS]   the proof on this machine's GPU: \
                tests, sanitizers, times; or pack it for another one",
        run: gpu::run,
    },
    Command {
        name: "mpi",
        usage: "mpi [--bench]   run the collectives' tests between processes under mpirun, or \
                time them beside the MPI's own",
        run: mpi::run,
    },
    Command {
        name: "nccl",
        usage: "nccl [-- TEST ARGUMENTS]   run the collectives' tests between emulated GPUs, on a \
                stand-in for NCCL",
        run: nccl::run,
    },
    Command {
        name: "python",
        usage: "python [--bare | --mpi | -- PYTEST ARGUMENTS]   test the Python package beside the \
                pinned PyTorch, under mpirun, or its seam alone without PyTorch",
        run: python::run,
    },
    Command {
        name: "wheel",
        usage: "wheel [--from-sdist]   build the Python package: a wheel and a source \
                distribution, and once more from that",
        run: python::wheel,
    },
    Command {
        name: "simulate",
        usage: "simulate [--seeds N | --seed S]   whole training runs under seeds, with deaths, \
                stalls, lost power, full disks and rot",
        run: simulate::run,
    },
    Command {
        name: "faults",
        usage: "faults   step, save, resume and reshard with an error or their death at every \
                call that changes a file",
        run: faults::run,
    },
    Command {
        name: "fuzz",
        usage: "fuzz [--seconds N] [--seed S]   any bytes as files, plans and launches, each \
                target of fuzz/ for so long",
        run: fuzz::run,
    },
    Command {
        name: "planted",
        usage: "planted [WORD...]   put bugs into a copy of the sources, one after the other, and \
                see each found by the tool that is there for it",
        run: planted::run,
    },
    Command {
        name: "nightly",
        usage: "nightly [WORD]   what takes longer than a change may wait for: kills, a million \
                seeds, sanitizers, features, licences, mutants",
        run: nightly::run,
    },
    Command {
        name: "package",
        usage: "package [--candle VERSION | --semver]   pack every public crate as for a registry, and run programs that depend \
                on nothing but what was packed",
        run: package::run,
    },
    Command {
        name: "sanitize",
        usage: "sanitize thread|address [-- TEST ARGUMENTS]   run the tests of what threads share \
                under a sanitizer of the compiler",
        run: sanitize::run,
    },
];

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
    let usage = || {
        let lines: Vec<_> =
            COMMANDS.iter().map(|command| format!("  cargo xtask {}", command.usage)).collect();
        lines.join("\n")
    };
    let Some((name, rest)) = arguments.split_first() else {
        bail!("a command is missing; there are\n{}", usage());
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        println!("{}", usage());
        return Ok(());
    }
    let command = COMMANDS
        .iter()
        .find(|command| command.name == name)
        .with_context(|| format!("`{name}` is no command; there are\n{}", usage()))?;
    (command.run)(rest)
}

/// The folder of the workspace's `Cargo.toml`.
fn workspace_root() -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("xtask lies one folder below the workspace").to_path_buf()
}
