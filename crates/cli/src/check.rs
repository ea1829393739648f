//! `fusestep check`: what this machine offers and what is missing.

use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use fusestep_cuda::CudaBackend;
use fusestep_simd::Level;
use serde::Serialize;

use crate::options::threads;
use crate::output::{print, print_json};

/// Folders in which Linux distributions and CUDA put shared libraries.
const LIBRARY_FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
    "/usr/lib",
];

/// Flags of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Print the findings as one JSON object
    #[arg(long)]
    json: bool,
}

/// One thing a machine may have.
#[derive(Debug, Serialize)]
struct Finding {
    part: &'static str,
    present: bool,
    /// What there is, or what is missing and what it would take.
    detail: String,
}

#[derive(Debug, Serialize)]
struct Findings {
    findings: Vec<Finding>,
}

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let findings = vec![simd(), thread_count(), cuda(), mpi(), nccl()];
    if args.json {
        return print_json(&Findings { findings });
    }
    let mut text = String::new();
    for finding in &findings {
        let mark = if finding.present { "yes" } else { "no" };
        let _ = writeln!(text, "{:<8} {mark:<4} {}", finding.part, finding.detail);
    }
    print(&text)
}

fn simd() -> Finding {
    let names: Vec<&str> = Level::available()
        .iter()
        .map(|level| level.name())
        .collect();
    Finding {
        part: "simd",
        present: names.len() > 1,
        detail: format!(
            "{} in use; this processor has {}; every level gives the same bits",
            Level::detect(),
            names.join(", ")
        ),
    }
}

fn thread_count() -> Finding {
    Finding {
        part: "threads",
        present: true,
        detail: format!("{} in use unless --threads says otherwise", threads(None)),
    }
}

fn cuda() -> Finding {
    let (present, detail) = match CudaBackend::open(0) {
        Ok(backend) => (true, backend.device_info().to_string()),
        Err(error) => (false, error.to_string()),
    };
    Finding {
        part: "cuda",
        present,
        detail,
    }
}

fn mpi() -> Finding {
    let found = env::var_os("PATH").and_then(|paths| {
        let mut places = env::split_paths(&paths).map(|folder| folder.join("mpirun"));
        places.find(|place| place.is_file())
    });
    let missing = "no mpirun on the PATH; install an MPI (Debian: openmpi-bin, libopenmpi-dev) to run ranks on many machines";
    located("mpi", found, missing)
}

fn nccl() -> Finding {
    let own = env::var_os("LD_LIBRARY_PATH");
    let own = own.iter().flat_map(env::split_paths);
    let folders = own.chain(LIBRARY_FOLDERS.iter().map(PathBuf::from));
    let mut places = folders.map(|folder| folder.join("libnccl.so.2"));
    let found = places.find(|place| Path::is_file(place));
    let missing = "no libnccl.so.2 in the library folders; install NCCL (Debian: libnccl2) to run ranks on many GPUs";
    located("nccl", found, missing)
}

fn located(part: &'static str, found: Option<PathBuf>, missing: &str) -> Finding {
    Finding {
        part,
        present: found.is_some(),
        detail: found.map_or(missing.to_owned(), |place| {
            format!(
                "{} is installed; this build runs ranks in one process only",
                place.display()
            )
        }),
    }
}
