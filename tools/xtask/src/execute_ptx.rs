//! `execute-ptx`: the PTX as shipped, run on the CPU instruction by instruction by the CUDA tests.

mod counts;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};
use fusestep_cuda_emulator::{Options, build};

use crate::commands::{Program, built, cargo, must, named};
use crate::emulate::{SUITE, split};
use crate::{mutants, target_folder, workspace_root};

/// Tests of a program, by parts of their names; none for all of them.
type Tests = (&'static str, &'static [&'static str]);

/// What runs if nothing else is asked for: every entry on small tensors, and what small tensors do
/// not show: chunks and launches that cut them, addresses that no pack fits, graphs, faults.
const EACH_ONCE: [Tests; 5] = [
    ("every_entry", &[]),
    (
        "emulated",
        &[
            "chunks_of_64_elements_three_to_a_launch_give_the_same_bits",
            "addresses_that_no_pack_fits_give_the_same_bits_and_touch_nothing_else",
        ],
    ),
    (
        "normed",
        &[
            "addresses_that_no_pack_fits_give_the_same_bits_and_touch_nothing_else",
            "excluded_tensors_take_the_rate_that_the_option_says",
        ],
    ),
    ("resident", &["a_graph_replays_the_whole_tail_with_the_bits_of_plain_steps"]),
    ("faults", &[]),
];

/// Tests that build drivers from broken sources: they say nothing about PTX.
const OF_SOURCES: &str = "mutants_that";

/// What the command line asks for.
#[derive(Default)]
struct Request {
    /// The whole suite.
    all: bool,
    /// What an element costs each entry, as a table, in place of the tests.
    counts: bool,
    /// Broken PTX in place of the tests, and words in the names of mutants that are run.
    mutants: Option<Vec<String>>,
    /// From which schedules are drawn; 0: warps in step.
    seed: Option<u64>,
}

/// Builds the emulator and runs the tests, the counts or the mutants, on PTX.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, tests) = split(arguments);
    let request = Request::parse(own)?;
    let root = workspace_root();
    let folder = target_folder().join("emulator");
    build(&root.join("kernels"), &folder, &Options::default())?;
    let counts = target_folder().join("execute-ptx-counts.jsonl");
    let suite = Suite::build(&folder, &counts, request.seed)?;
    if let Some(words) = request.mutants {
        return mutants::ptx::run(&suite, &root, &words);
    }
    if request.counts {
        return counts::of_an_element(&suite, &counts);
    }
    let _ = std::fs::remove_file(&counts);
    if request.all || !tests.is_empty() {
        for program in &suite.programs {
            suite.pass(&program.path, tests)?;
        }
    } else {
        for (name, tests) in EACH_ONCE {
            let tests: Vec<String> = tests.iter().map(|&test| test.to_owned()).collect();
            suite.pass(named(&suite.programs, name)?, &tests)?;
        }
    }
    if !tests.is_empty() {
        return Ok(());
    }
    counts::check_coverage(&counts::read(&counts)?, &root)
}

impl Request {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut request = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--all" => request.all = true,
                "--counts" => request.counts = true,
                "--mutants" => request.mutants = Some(Vec::new()),
                "--seed" => {
                    let seed = words.next().context("expected a number behind --seed")?;
                    request.seed = Some(seed.parse()?);
                }
                word => match &mut request.mutants {
                    Some(words) if !word.starts_with('-') => words.push(word.to_owned()),
                    _ => bail!(
                        "expected `execute-ptx [--all] [--seed N] [--counts] [--mutants \
                         [WORD...]] [-- TEST ARGUMENTS]`, found `{word}`"
                    ),
                },
            }
        }
        Ok(request)
    }
}

/// The CUDA tests with what makes them run on PTX.
pub(crate) struct Suite {
    environment: Vec<(&'static str, OsString)>,
    programs: Vec<Program>,
}

impl Suite {
    /// Has cargo build the programs of the suite.
    fn build(folder: &Path, counts: &Path, seed: Option<u64>) -> Result<Self> {
        let mut environment: Vec<(&str, OsString)> = vec![
            ("CUDA_LIBRARY_PATH", folder.into()),
            ("LD_LIBRARY_PATH", folder.join("lib64").into()),
            ("FUSESTEP_EMULATOR_CODE", "ptx".into()),
            ("FUSESTEP_PTX_COUNTS", counts.into()),
        ];
        environment.extend(seed.map(|seed| ("FUSESTEP_PTX_SEED", seed.to_string().into())));
        let mut cargo = cargo(&format!("test {SUITE} --no-run"));
        let programs = built(cargo.envs(environment.iter().cloned()))?;
        Ok(Self { environment, programs })
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(workspace_root().join("crates/cuda"));
        command.envs(self.environment.iter().cloned());
        command
    }

    /// Requires tests of a program to pass.
    fn pass(&self, program: &Path, arguments: &[String]) -> Result<()> {
        let mut command = self.command(program);
        command.args(arguments).args(["--skip", OF_SOURCES]);
        let failed = format!("tests failed on the PTX: {}", program.display());
        must(&mut command, &failed)
    }

    /// Runs the one test of that name with another text in place of its module.
    pub(crate) fn one_with(&self, program: &str, test: &str, text: &Path) -> Result<Output> {
        let mut command = self.command(named(&self.programs, program)?);
        command.args([test, "--exact"]);
        command.env("FUSESTEP_PTX_INSTEAD", text);
        command.output().context("cannot start a test program")
    }
}
