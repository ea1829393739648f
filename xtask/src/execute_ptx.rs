//! `execute-ptx`: the PTX as shipped, run on the CPU instruction by instruction by the CUDA tests.

mod counts;
mod mutants;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};
use fusestep_cuda_emulator::{Options, build};

use crate::emulate::{SUITE, split};
use crate::workspace_root;

/// Tests that together run entries of every kernel and most storage classes, in under a minute.
const EACH_ONCE: [&str; 6] = [
    "every_rule_and_format_has_the_norms_of_the_host",
    "every_rule_cut_in_every_way_has_the_norms_of_the_host",
    "tensors_that_are_not_finite_are_left_and_counted",
    "clipped_and_scaled_steps_give_the_bits_of_the_host",
    "chunks_of_64_elements_three_to_a_launch_give_the_same_bits",
    "a_fault_of_the_device_shows_with_its_code_and_stays",
];

/// Tests that build drivers from broken sources: they say nothing about PTX.
const OF_SOURCES: &str = "mutants_that";

/// What the command line asks for.
#[derive(Default)]
struct Request {
    /// The whole suite.
    all: bool,
    /// What each entry did, as a table.
    counts: bool,
    /// Broken PTX in place of the tests.
    mutants: bool,
    /// From which schedules are drawn; 0: warps in step.
    seed: Option<u64>,
}

/// Builds the emulator and runs the suite, or the mutants, on PTX.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (own, tests) = split(arguments);
    let request = Request::parse(own)?;
    let root = workspace_root();
    let folder = root.join("target/emulator");
    build(&root.join("kernels"), &folder, &Options::default())?;
    let counts = root.join("target/execute-ptx-counts.jsonl");
    let _ = std::fs::remove_file(&counts);
    let mut suite = Suite::new(&folder, &counts);
    if let Some(seed) = request.seed {
        suite.set("FUSESTEP_PTX_SEED", seed.to_string());
    }
    if request.mutants {
        return mutants::run(&suite, &root);
    }
    let mut tests = tests.to_vec();
    let chosen = !tests.is_empty();
    if !request.all && !chosen {
        tests = EACH_ONCE.map(str::to_owned).to_vec();
    }
    tests.extend(["--skip".to_owned(), OF_SOURCES.to_owned()]);
    let status = suite
        .command(&tests)
        .status()
        .context("cannot start cargo")?;
    ensure!(status.success(), "the CUDA tests failed on the PTX");
    let ran = counts::read(&counts)?;
    if request.counts {
        counts::print(&ran);
    }
    if chosen {
        return Ok(());
    }
    let required = if request.all {
        counts::Required::AllClasses
    } else {
        counts::Required::Nothing
    };
    counts::check_coverage(&ran, &root, required)
}

impl Request {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut request = Self::default();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--all" => request.all = true,
                "--counts" => request.counts = true,
                "--mutants" => request.mutants = true,
                "--seed" => {
                    let seed = words.next().context("expected a number behind --seed")?;
                    request.seed = Some(seed.parse()?);
                }
                _ => bail!(
                    "expected `execute-ptx [--all] [--seed N] [--counts] [--mutants] [-- TEST \
                     ARGUMENTS]`, found `{word}`"
                ),
            }
        }
        Ok(request)
    }
}

/// The CUDA tests with what makes them run on PTX.
pub(crate) struct Suite {
    environment: Vec<(OsString, OsString)>,
}

impl Suite {
    fn new(folder: &Path, counts: &Path) -> Self {
        let mut suite = Self {
            environment: Vec::new(),
        };
        suite.set("CUDA_LIBRARY_PATH", folder);
        suite.set("LD_LIBRARY_PATH", folder.join("lib64"));
        suite.set("FUSESTEP_EMULATOR_CODE", "ptx");
        suite.set("FUSESTEP_PTX_COUNTS", counts);
        suite
    }

    fn set(&mut self, name: &str, value: impl Into<PathBuf>) {
        self.environment
            .push((name.into(), value.into().into_os_string()));
    }

    fn command(&self, tests: &[String]) -> Command {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.current_dir(workspace_root()).arg("test");
        command.args(SUITE).arg("--").args(tests);
        command.envs(self.environment.iter().cloned());
        command
    }

    /// Runs the one test of that name with another text in place of its module.
    fn one_with(&self, test: &str, text: &Path) -> Result<Output> {
        let mut command = self.command(&[test.to_owned(), "--exact".to_owned()]);
        command.env("FUSESTEP_PTX_INSTEAD", text);
        command.output().context("cannot start cargo")
    }
}
