//! `fusestep check`: parts that this machine offers, and parts that are missing.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use fusestep_collective::{
    AllReduceRow, CollectiveError, Costs, Link, measure, measure_all_reduce, self_test,
};
use fusestep_planner::Topology;
use fusestep_simd::Level;
use fusestep_tensor::{counted, grouped};
use serde::Serialize;

use crate::engine::{Engine, Ranks};
use crate::figures::Kept;
use crate::options::{name_of, threads};
use crate::output::{duration, print, print_json, working};

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
    /// Test the collectives of this engine instead, and print how fast they are
    #[arg(long, value_enum)]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) ranks: Ranks,
    /// Print the findings as one JSON object
    #[arg(long)]
    json: bool,
}

/// One part that a machine may have.
#[derive(Debug, Serialize)]
struct Finding {
    part: &'static str,
    present: bool,
    /// The part that was found, or the missing part and how to get it.
    detail: String,
}

/// The result that a test of collectives prints with `--json`.
#[derive(Debug, Serialize)]
struct Tested {
    engine: String,
    ranks: usize,
    right: Vec<&'static str>,
    /// An all-reduce on memory that no cache has.
    link: Link,
    /// Costs that `plan` predicts a step from.
    costs: Costs,
    rows: Vec<AllReduceRow>,
    /// Place of this rank.
    #[serde(skip)]
    topology: Topology,
}

/// Bytes of the buffers in the table of bandwidths.
const TABLE: [u64; 5] = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20];

/// Tests every collective and measures the all-reduce.
fn collectives(engine: Engine, args: &CheckArgs) -> anyhow::Result<()> {
    let measuring = working("trying and measuring every call");
    let found = engine.run(&args.ranks, |comm| {
        let right = self_test(comm)?;
        let rows = measure_all_reduce(comm, &TABLE, Level::detect())?;
        let costs = measure(comm)?;
        Ok::<_, CollectiveError>(Tested {
            engine: name_of(engine),
            ranks: comm.world_size(),
            right,
            link: costs.all_reduce,
            costs,
            rows,
            topology: Topology::of(comm),
        })
    });
    measuring.finish_and_clear();
    // Other ranks have nothing to say.
    let Some(tested) = found? else {
        return Ok(());
    };
    let kept = Kept::so_far().map(|kept| {
        let mut kept = kept?;
        kept.add(engine, tested.topology, tested.costs);
        kept.keep()
    });
    if args.json {
        return print_json(&tested);
    }
    let mut text = format!("{}, engine {}\n", counted(tested.ranks as u64, "rank"), tested.engine);
    for name in &tested.right {
        let _ = writeln!(text, "  right     {name}");
    }
    let _ = writeln!(text, "all-reduce of f32, in place");
    for row in &tested.rows {
        let _ = writeln!(
            text,
            "{:>14} B  {:>10}  {:>7.2} GB/s",
            grouped(row.len_bytes),
            duration(row.seconds * 1e9),
            row.len_bytes as f64 / row.seconds / 1e9
        );
    }
    let _ = writeln!(
        text,
        "on memory that no cache has, a call costs {} and a second for each {:.2} GB, a \
         reduce-scatter for each {:.2} GB, an all-gather for each {:.2} GB; copies move {:.2} GB \
         in a second\nevery collective is right",
        cost_of_call(tested.link.alpha_seconds * 1e9),
        tested.link.beta_bytes_per_second / 1e9,
        tested.costs.reduce_scatter.beta_bytes_per_second / 1e9,
        tested.costs.all_gather.beta_bytes_per_second / 1e9,
        tested.costs.memory_bytes_per_second / 1e9
    );
    if let Some(kept) = kept {
        let _ = writeln!(text, "figures: {}", kept.unwrap_or_else(|error| error.to_string()));
    }
    print(&text)
}

/// The cost of a call that moves next to nothing, in words. It is the intercept of a line through
/// measured times, which may pass through zero.
fn cost_of_call(nanoseconds: f64) -> String {
    if nanoseconds < 1.0 {
        return "less than the clock tells".to_owned();
    }
    duration(nanoseconds)
}

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    if let Some(engine) = args.engine {
        return collectives(engine, args);
    }
    args.ranks.require_none("--engine")?;
    let measuring = working("measuring this machine's memory and calls");
    let mut findings = vec![simd(), thread_count(), cuda(), mpi(), nccl()];
    findings.extend(figures());
    measuring.finish_and_clear();
    if args.json {
        return print_json(&BTreeMap::from([("findings", findings)]));
    }
    let mut text = String::new();
    for finding in &findings {
        let mark = if finding.present { "yes" } else { "no" };
        let _ = writeln!(text, "{:<8} {mark:<4} {}", finding.part, finding.detail);
    }
    print(&text)
}

/// Measures this machine's figures and keeps them; `None` where the user asks for none.
fn figures() -> Option<Finding> {
    let measured = Kept::so_far()?.map_err(anyhow::Error::from).and_then(|mut kept| {
        kept.measure()?;
        Ok(kept.keep()?)
    });
    let (present, detail) = match measured {
        Ok(told) => (true, told),
        Err(error) => (false, error.to_string()),
    };
    Some(Finding { part: "figures", present, detail })
}

fn simd() -> Finding {
    let names: Vec<&str> = Level::available().iter().map(|level| level.name()).collect();
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
    let (present, detail) = match threads(None) {
        Ok(all) => (true, format!("{all} in use unless --threads says otherwise")),
        Err(error) => (false, error.to_string()),
    };
    Finding { part: "threads", present, detail }
}

#[cfg(feature = "cuda")]
fn device() -> anyhow::Result<String> {
    let backend = fusestep_cuda::CudaBackend::open(0)?;
    Ok(backend.device_info().to_string())
}

#[cfg(not(feature = "cuda"))]
fn device() -> anyhow::Result<String> {
    anyhow::bail!(crate::options::NO_CUDA)
}

fn cuda() -> Finding {
    let (present, detail) = match device() {
        Ok(found) => (true, found),
        Err(error) => (false, error.to_string()),
    };
    Finding { part: "cuda", present, detail }
}

fn mpi() -> Finding {
    let found = env::var_os("PATH").and_then(|paths| {
        let mut places = env::split_paths(&paths).map(|folder| folder.join("mpirun"));
        places.find(|place| place.is_file())
    });
    let missing = "no mpirun on the PATH; install an MPI (Debian: openmpi-bin, libopenmpi-dev) to \
                   run ranks on many machines";
    let used = if cfg!(feature = "mpi") {
        "`mpirun -n 4 fusestep check --engine mpi` tests it"
    } else {
        "this build leaves it out; `cargo install --path crates/cli --features mpi` builds it in"
    };
    located("mpi", found, missing, used)
}

fn nccl() -> Finding {
    let own = env::var_os("LD_LIBRARY_PATH");
    let own = own.iter().flat_map(env::split_paths);
    let folders = own.chain(LIBRARY_FOLDERS.iter().map(PathBuf::from));
    let mut places = folders.map(|folder| folder.join("libnccl.so.2"));
    let found = places.find(|place| Path::is_file(place));
    let missing = "no libnccl.so.2 in the library folders; install NCCL (Debian: libnccl2) to run \
                   ranks on many GPUs";
    let used = if cfg!(feature = "nccl") {
        "`fusestep check --engine nccl --ranks N` tests it on N GPUs"
    } else {
        "this build leaves it out; `cargo install --path crates/cli --features nccl` builds it in"
    };
    located("nccl", found, missing, used)
}

fn located(part: &'static str, found: Option<PathBuf>, missing: &str, used: &str) -> Finding {
    Finding {
        part,
        present: found.is_some(),
        detail: found.map_or(missing.to_owned(), |place| {
            format!("{} is installed; {used}", place.display())
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_not_said_to_cost_nothing() {
        for (nanoseconds, told) in [
            (0.0, "less than the clock tells"),
            (0.9, "less than the clock tells"),
            (1.0, "1 ns"),
            (2_500.0, "2.5 µs"),
        ] {
            assert_eq!(cost_of_call(nanoseconds), told);
        }
    }
}
