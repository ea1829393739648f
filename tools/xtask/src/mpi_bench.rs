//! `mpi --bench`: our all-reduces beside a C program that calls MPI's, all in turn in one run, two
//! ranks each.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::commands::{must, named};
use crate::mpi::{Ended, Job, build};
use crate::waves::numels;
use crate::{target_folder, workspace_root};

/// Bytes of each rank's buffer.
const SIZES: [u64; 5] = [4 << 10, 1 << 20, 25 << 20, 64 << 20, 256 << 20];

/// Everything is timed this often, in turn; the best median counts.
const ROUNDS: usize = 3;

const BUCKET: u64 = 25 << 20;

/// Best median of each size, in seconds.
type Times = Vec<f64>;

pub(crate) fn run() -> Result<()> {
    let root = workspace_root();
    let built = build("build", &["--bin=fusestep"])?;
    let fusestep = named(&built, "fusestep")?;
    let folder = target_folder().join("mpi");
    std::fs::create_dir_all(&folder)?;
    let peer = folder.join("mpi_all_reduce");
    must(
        Command::new("mpicc")
            .args(["-O2", "-o"])
            .arg(&peer)
            .arg(root.join("benches/peers/mpi_all_reduce.c")),
        "mpicc failed",
    )?;
    let numels = numels(&root.join("data/shapes/resnet50.json"))?;
    let gradients: Vec<u64> = numels.iter().map(|numel| 4 * numel).collect();
    let total: u64 = gradients.iter().sum();
    let mut sizes = SIZES.to_vec();
    sizes.push(total % BUCKET);
    let [mut direct, mut threaded, mut native, mut ours, mut threads] = [const { Times::new() }; 5];
    let mut one_by_one = Times::new();
    for _ in 0..ROUNDS {
        better(&mut direct, of_peer(&peer, "sizes", &sizes)?);
        better(&mut threaded, of_peer(&peer, "sizes-threaded", &sizes)?);
        better(&mut native, of_fusestep(fusestep, "mpi-native", &sizes)?);
        better(&mut ours, of_fusestep(fusestep, "mpi", &sizes)?);
        better(&mut threads, of_fusestep(fusestep, "thread", &sizes)?);
        better(&mut one_by_one, of_peer(&peer, "list", &gradients)?);
    }
    println!(
        "| bytes | MPI from C | the same on an MPI for threads | mpi-native | / C | / C for \
         threads | mpi | thread | C / thread |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (at, bytes) in sizes.iter().enumerate() {
        let times = [direct[at], threaded[at], native[at], ours[at], threads[at]].map(readable);
        println!(
            "| {bytes} | {} | {} | {} | {:.3} | {:.3} | {} | {} | {:.2} |",
            times[0],
            times[1],
            times[2],
            native[at] / direct[at],
            native[at] / threaded[at],
            times[3],
            times[4],
            direct[at] / threads[at]
        );
    }
    let bucket = SIZES.iter().position(|&bytes| bytes == BUCKET).context("a bucket is timed")?;
    let in_buckets = |times: &Times| (total / BUCKET) as f64 * times[bucket] + times[SIZES.len()];
    println!(
        "ResNet-50, {} gradients, {total} bytes: MPI from C one by one {}, threads in buckets of \
         25 MiB {}, ratio {:.2}",
        gradients.len(),
        readable(one_by_one[0]),
        readable(in_buckets(&threads)),
        one_by_one[0] / in_buckets(&threads)
    );
    Ok(())
}

fn better(best: &mut Times, times: Times) {
    if best.is_empty() {
        *best = times;
        return;
    }
    for (best, time) in best.iter_mut().zip(times) {
        *best = best.min(time);
    }
}

fn of_peer(peer: &Path, mode: &str, sizes: &[u64]) -> Result<Times> {
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    let mut arguments = vec![mode];
    arguments.extend(sizes.iter().map(String::as_str));
    let text = job(peer, &arguments)?;
    let seconds = |line: &str| line.split(' ').nth(1).and_then(|text| text.parse::<f64>().ok());
    let times: Times = text.lines().filter_map(seconds).collect();
    ensure!(!times.is_empty(), "the C program printed no times:\n{text}");
    Ok(times)
}

fn of_fusestep(fusestep: &Path, engine: &str, sizes: &[u64]) -> Result<Times> {
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    let sizes = sizes.join(",");
    let arguments =
        ["bench", "--collective", "all-reduce", "--engine", engine, "--sizes", &sizes, "--json"];
    let text = match engine {
        "thread" => {
            let output = Command::new(fusestep).args(arguments).output()?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout)?
        }
        _ => job(fusestep, &arguments)?,
    };
    let line = text.lines().find(|line| line.starts_with('{'));
    let summary: Value = serde_json::from_str(line.context("fusestep printed no numbers")?)?;
    let rows = summary["rows"].as_array().context("a summary has rows")?;
    Ok(rows.iter().filter_map(|row| row["seconds"].as_f64()).collect())
}

/// What two ranks of a program print.
fn job(program: &Path, arguments: &[&str]) -> Result<String> {
    let end =
        Job { ranks: 2, program, arguments, environment: &[], limit: Duration::from_secs(300) }
            .run()?;
    ensure!(end.ended == Ended::Success, "{}: {:?}\n{}", program.display(), end.ended, end.output);
    Ok(end.output)
}

fn readable(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s => format!("{:.1} ms", s * 1e3),
    }
}
