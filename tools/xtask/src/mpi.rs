//! `mpi`: the collectives between processes, started by mpirun and watched from outside.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{Program, built, cargo, must, named};
use crate::{mpi_bench, mpi_lanes, mpi_victims, parallel};

/// Runs the suite in worlds of one to five ranks, the variants of it, and the jobs in which a
/// process dies; or the benchmark.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mpirun = Command::new("mpirun").arg("--version").output();
    ensure!(
        mpirun.is_ok_and(|output| output.status.success()),
        "there is no mpirun; install an MPI and libclang (Debian: openmpi-bin, libopenmpi-dev, \
         libclang-dev)"
    );
    match arguments {
        [] => suite(),
        [flag] if flag == "--bench" => mpi_bench::run(),
        _ => bail!("expected `mpi [--bench]`, found {arguments:?}"),
    }
}

/// Has ranks of one machine send messages all the same.
pub(crate) const MESSAGES: (&str, &str) = ("FUSESTEP_MPI_MESSAGES", "1");

fn suite() -> Result<()> {
    let programs =
        build("test", &["--no-run", "--lib", "--test=mpi", "--test=victim", "--test=candle_mpi"])?;
    let program = |name: &str| named(&programs, name);
    let (suite, victim) = (program("mpi")?, program("victim")?);
    let units = program("fusestep_collective_mpi")?;
    must(&mut Command::new(units), "the unit tests failed")?;
    communicators(suite)?;
    for ranks in 1..=3 {
        tests(program("candle_mpi")?, ranks, &[], &[])?;
    }
    mpi_victims::run(victim, &[&[], &[MESSAGES]])?;
    let built = build("build", &["--bin=fusestep"])?;
    let fusestep = named(&built, "fusestep")?;
    self_test(fusestep)?;
    mpi_victims::training(fusestep)?;
    mpi_lanes::run(fusestep)?;
    println!("mpi: all is well");
    Ok(())
}

/// Ranks, filters of tests, variables of the environment.
type Tests<'a> = (usize, &'a [&'a str], &'a [(&'a str, &'a str)]);

/// The communicator's tests: whole in worlds of one to five ranks, and in part over messages cut
/// small and over the engine.
fn communicators(suite: &Path) -> Result<()> {
    // Within a machine and as between machines. Three ranks wait longest, and begin.
    let mut jobs: Vec<Tests<'_>> = Vec::new();
    for ranks in [3, 5, 4, 2, 1] {
        jobs.extend([(ranks, &[][..], &[][..]), (ranks, &[], &[MESSAGES])]);
    }
    let bits = ["operations::", "same_bits::", "streams::", "zz_leave::"];
    // Messages cut in the midst of elements, and segments of a few elements.
    let cut =
        [MESSAGES, ("FUSESTEP_MPI_CHUNK_BYTES", "4001"), ("FUSESTEP_MPI_SEGMENT_BYTES", "5000")];
    jobs.extend([(2, &bits[..], &cut[..]), (3, &bits, &cut)]);
    let first = [MESSAGES, ("FUSESTEP_MPI_FIRST_OF_EACH", "1")];
    jobs.push((3, &bits, &first));
    // Between two ranks there is one order only, so that the engine's sums are ours.
    let engine = [("FUSESTEP_MPI_ENGINE", "1"), ("FUSESTEP_MPI_CHUNK_BYTES", "40004")];
    let of_engine = ["operations::", "streams::", "mismatches::", "zz_leave::"];
    jobs.push((2, &of_engine, &engine));
    let fast = [("FUSESTEP_MPI_ENGINE", "1"), ("FUSESTEP_MPI_FIRST_OF_EACH", "1")];
    let of_fast = ["operations::", "streams::", "zz_leave::"];
    jobs.push((2, &of_fast, &fast));
    // Side by side: ranks that wait for deadlines leave the cores to others.
    parallel::map_waiting(&jobs, |(ranks, filters, environment)| {
        tests(suite, *ranks, filters, environment)
    })?;
    Ok(())
}

/// Runs tests whose names contain one of `filters` on every rank.
fn tests(
    program: &Path,
    ranks: usize,
    filters: &[&str],
    environment: &[(&str, &str)],
) -> Result<()> {
    let mut arguments = vec!["--test-threads=1", "--color=never"];
    arguments.extend(filters);
    let job =
        Job { ranks, program, arguments: &arguments, environment, limit: Duration::from_secs(300) };
    let end = job.run()?;
    let passed = end.output.matches("test result: ok").count();
    ensure!(
        end.ended == Ended::Success && passed == ranks,
        "{ranks} ranks, {filters:?}, {environment:?}: expected {ranks} good ends, found {passed} \
         and {:?}:\n{}",
        end.ended,
        end.output
    );
    println!(
        "mpi: {ranks} ranks {filters:?} {environment:?}: ok, {:.1} s",
        end.elapsed.as_secs_f64()
    );
    Ok(())
}

/// `fusestep check` on four processes, and that a job is not taken for four runs.
fn self_test(fusestep: &Path) -> Result<()> {
    let job = |arguments: &'static [&'static str]| Job {
        ranks: 4,
        program: fusestep,
        arguments,
        environment: &[],
        limit: Duration::from_secs(120),
    };
    let end = job(&["check", "--engine", "mpi"]).run()?;
    let found = end.ended == Ended::Success && end.output.contains("every collective is right");
    ensure!(found, "the self-test failed:\n{}", end.output);
    println!("{}", end.output.trim_end());
    let end = job(&["check"]).run()?;
    let refused = end.ended == Ended::Failure && end.output.contains("4 processes were started");
    ensure!(refused, "expected a refusal of four separate runs, found\n{}", end.output);
    disagreements(fusestep)
}

/// The engine of a rank, as its launcher numbers it.
const OTHER_ENGINE: &str = r#"case "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" in 0) engine=mpi;; *) engine=mpi-native;; esac
exec "$0" train --epochs 1 --engine "$engine""#;

/// That processes which were started differently say so on every rank, before they train.
fn disagreements(fusestep: &Path) -> Result<()> {
    let path = fusestep.to_string_lossy();
    let other_engine = ["-c", OTHER_ENGINE, &path];
    let other_count = ["train", "--epochs", "1", "--engine", "mpi", "--ranks", "3"];
    let named = "expected the 2 that the launcher has started, found 3";
    let other_check = ["check", "--engine", "mpi", "--ranks", "3"];
    let other_bench = ["bench", "--collective", "all-reduce", "--engine", "mpi"];
    let other_bench = [&other_bench[..], &["--ranks", "3"]].concat();
    let cases: [(&Path, &[&str], &str); 4] = [
        (Path::new("sh"), &other_engine, "expected the same engine and options on all processes"),
        (fusestep, &other_count, named),
        (fusestep, &other_check, named),
        (fusestep, &other_bench, named),
    ];
    for (program, arguments, expected) in cases {
        let end =
            Job { ranks: 2, program, arguments, environment: &[], limit: Duration::from_secs(60) }
                .run()?;
        let named = end.output.matches(expected).count();
        ensure!(
            end.ended == Ended::Failure && named == 2,
            "expected {expected:?} of both ranks, found it {named} times:\n{}",
            end.output
        );
    }
    println!("mpi: other engines and counts of ranks are named");
    Ok(())
}

/// Has cargo build some targets of the engines and the command line, optimised, and returns the
/// programs it made.
///
/// Always of the same packages with the same features, MPI among them where there is one: so
/// nothing is compiled twice for two suites, and what they are built on has the features that it
/// has in `cargo test --release`, as far as MPI's bindings allow.
pub(crate) fn build(command: &str, targets: &[&str]) -> Result<Vec<Program>> {
    let features = match Command::new("mpicc").arg("--version").output() {
        Ok(_) => "fusestep-cli/mpi,fusestep-cli/nccl",
        Err(_) => "fusestep-cli/nccl",
    };
    let packages = "--package fusestep-collective-mpi --package fusestep-collective-nccl --package \
                    fusestep-cli";
    let words = format!("{command} --release {packages} --features {features}");
    built(cargo(&words).args(targets))
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Success,
    Failure,
    /// It was still running at the limit and was ended from here.
    Never,
}

pub(crate) struct End {
    pub(crate) ended: Ended,
    pub(crate) output: String,
    pub(crate) elapsed: Duration,
}

/// Processes that mpirun starts.
pub(crate) struct Job<'a> {
    pub(crate) ranks: usize,
    pub(crate) program: &'a Path,
    pub(crate) arguments: &'a [&'a str],
    pub(crate) environment: &'a [(&'a str, &'a str)],
    pub(crate) limit: Duration,
}

/// Has a program of a shell's arguments, which takes the shell's place, write into a file of its
/// own: what several processes write into mpirun's one pipe is mixed within lines.
const INTO_A_FILE: &str = r#"exec "$@" >"$FUSESTEP_MPI_OUTPUT/$$" 2>&1"#;

impl Job<'_> {
    /// Runs the job; the watchdog over its time lies here, outside of what is tested.
    pub(crate) fn run(&self) -> Result<End> {
        let folder = new_folder("output");
        std::fs::create_dir_all(&folder)?;
        let own = File::create(folder.join("mpirun"))?;
        let mut command = Command::new("mpirun");
        command
            .args(["-n", &self.ranks.to_string()])
            .args(["sh", "-c", INTO_A_FILE, "sh"])
            .arg(self.program)
            .args(self.arguments)
            .env("FUSESTEP_MPI_OUTPUT", &folder)
            // More ranks than cores, and root in containers; each variable is one MPI's.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
            .envs(self.environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(own.try_clone()?)
            .stderr(own);
        let start = Instant::now();
        let mut child = command.spawn().context("cannot start mpirun")?;
        let ended = wait(&mut child, start + self.limit)?;
        let elapsed = start.elapsed();
        let mut texts = Vec::new();
        for file in std::fs::read_dir(&folder)? {
            let bytes = std::fs::read(file?.path())?;
            texts.push(String::from_utf8_lossy(&bytes).into_owned());
        }
        std::fs::remove_dir_all(&folder)?;
        Ok(End { ended, output: texts.join("\n"), elapsed })
    }
}

/// A path for a folder that no other job has, those that run beside it included.
pub(crate) fn new_folder(of: &str) -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(format!("fusestep-mpi-{of}-{process}-{number}"))
}

/// Waits for a launcher until `deadline`, then ends it.
fn wait(launcher: &mut Child, deadline: Instant) -> Result<Ended> {
    loop {
        match launcher.try_wait()? {
            Some(status) if status.success() => return Ok(Ended::Success),
            Some(_) => return Ok(Ended::Failure),
            None if Instant::now() > deadline => {
                // mpirun ends its processes on this signal, stopped ones too.
                let id = launcher.id().to_string();
                Command::new("kill").args(["-TERM", &id]).status()?;
                std::thread::sleep(Duration::from_secs(3));
                launcher.kill()?;
                launcher.wait()?;
                return Ok(Ended::Never);
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
