//! Runs with lanes on MPI's ranks: the hash of one process, however ranks share out a step.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::commands::output;
use crate::mpi::{Ended, Job, MESSAGES};
use crate::parallel;

/// Variables of the environment.
type Variables = &'static [(&'static str, &'static str)];

/// Short runs of 12 lanes: f32 by AdamW, and bf16 with masters by a rule of norms of layers.
const RUNS: [&str; 2] = [
    "train --epochs 1 --batch 96 --lanes 12 --clip-norm 1 --json",
    "train --epochs 1 --batch 96 --lanes 12 --optimizer lars --dtype bf16 --master-weights f32 \
     --json",
];

/// Numbers of ranks, flags, and whether ranks are as on several machines.
const RANKS: [(usize, &str, Variables); 7] = [
    (1, "", &[]),
    (2, "--zero 1", &[]),
    (3, "", &[]),
    (3, "--zero 2", &[MESSAGES]),
    (4, "--zero 3", &[]),
    (5, "--zero 3", &[MESSAGES]),
    (5, "--separate", &[]),
];

/// Trains each run in one process and on all these ranks.
pub(crate) fn run(fusestep: &Path) -> Result<()> {
    let cases: Vec<_> = RUNS.iter().flat_map(|run| RANKS.map(|ranks| (*run, ranks))).collect();
    let alone = RUNS.map(|run| -> Result<String> {
        let told = output(Command::new(fusestep).args(run.split_whitespace()))?;
        hashes(&told).first().map(|hash| (*hash).to_owned()).context("expected a hash, found none")
    });
    let alone = alone.into_iter().collect::<Result<Vec<String>>>()?;
    ensure!(alone[0] != alone[1], "two runs with one hash: {alone:?}");
    parallel::map_waiting(&cases, |&(run, (ranks, flags, environment))| {
        let own = run.split_whitespace().chain(flags.split_whitespace());
        let arguments: Vec<&str> = own.chain(["--engine", "mpi"]).collect();
        let limit = Duration::from_secs(300);
        let job = Job { ranks, program: fusestep, arguments: &arguments, environment, limit };
        let end = job.run()?;
        let expected = &alone[RUNS.iter().position(|own| *own == run).unwrap_or_default()];
        let found = hashes(&end.output);
        ensure!(
            end.ended == Ended::Success && found == [expected.as_str()],
            "{ranks} ranks of `{run} {flags}`, {environment:?}: expected the hash {expected} of \
             one process, found {found:?} and {:?}:\n{}",
            end.ended,
            end.output
        );
        Ok(())
    })?;
    println!("mpi: {} runs with lanes have the hashes of one process", cases.len());
    Ok(())
}

/// What stands behind `params_hash` in what a run has printed.
fn hashes(text: &str) -> Vec<&str> {
    let behind = text.split("\"params_hash\"").skip(1);
    behind.filter_map(|text| text.split('"').nth(1)).collect()
}
