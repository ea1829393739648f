//! Jobs in which one of three processes stops, dies or goes, during each collective: what the
//! others must have done.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::mpi::{End, Ended, Job, new_folder};
use crate::parallel;

/// The ranks' timeout; survivors must be through within twice that. A machine that is busy with
/// other things may keep a rank waiting for its core for longer; so what fails with the first is
/// tried once more with the second, by itself, and what is broken fails again.
const TIMEOUTS_MS: [u64; 2] = [1500, 6000];

const COLLECTIVES: [&str; 11] = [
    "all-reduce",
    "reduce",
    "broadcast",
    "all-gather",
    "reduce-scatter",
    "scatter",
    "gather",
    "all-to-all",
    "barrier",
    "split",
    "transfers around",
];

/// What the one process does.
const ENDS: [&str; 5] = ["stop", "kill", "leave", "exit", "nap"];

/// Runs them all, each once with each of these sets of environment variables.
pub(crate) fn run(program: &Path, variables: &[&[(&str, &str)]]) -> Result<()> {
    let mut jobs = Vec::new();
    for variables in variables {
        for how in ENDS {
            let collectives = COLLECTIVES.into_iter().zip([0, 1, 2].into_iter().cycle());
            jobs.extend(
                collectives.map(|(collective, culprit)| (how, collective, culprit, *variables)),
            );
        }
    }
    twice(&jobs, |(how, collective, culprit, variables), timeout_ms| {
        let variables = [grace(timeout_ms), variables].concat();
        within(program, (how, collective), culprit, timeout_ms, &variables)
    })?;
    println!(
        "mpi: a rank that does each of {ENDS:?} in each of {COLLECTIVES:?}, with {variables:?}: ok"
    );
    Ok(())
}

/// Runs jobs side by side with the first timeout, and those that fail one by one with the second.
fn twice<T: Copy + Sync>(jobs: &[T], run: impl Fn(T, u64) -> Result<()> + Sync) -> Result<()> {
    let [first, second] = TIMEOUTS_MS;
    let failed = parallel::map_waiting(jobs, |job| Ok(run(*job, first).err()))?;
    for (job, error) in jobs.iter().zip(failed) {
        if let Some(error) = error {
            eprintln!("mpi: once more with {second} ms in place of {first}: {error:#}");
            run(*job, second)?;
        }
    }
    Ok(())
}

/// Stops a process of a shell's arguments, which takes the shell's place, in the midst of its work.
const STOPPED_LATER: &str = r#"if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then (sleep 3; kill -STOP $$) & fi; exec "$@""#;

/// Training in which a process stops: at stages at which ranks wait in reductions, in gathers, and
/// on communication streams beside their own work.
pub(crate) fn training(fusestep: &Path) -> Result<()> {
    let jobs = [
        &["--zero", "0", "--comm-streams", "0"][..],
        &["--zero", "1"],
        &["--zero", "2", "--comm-streams", "1"],
        &["--zero", "3", "--comm-streams", "2"],
    ];
    twice(&jobs, |flags, timeout_ms| {
        stopped(fusestep, flags, timeout_ms)?;
        println!("mpi: training {flags:?} of which a rank stops: ok");
        Ok(())
    })
}

fn stopped(fusestep: &Path, flags: &[&str], timeout_ms: u64) -> Result<()> {
    let folder = new_folder("training");
    let (path, program) = (folder.to_string_lossy(), fusestep.to_string_lossy());
    let seconds = (timeout_ms as f64 / 1000.0).to_string();
    let mut arguments = vec!["-c", STOPPED_LATER, "sh", &program, "train"];
    arguments.extend(["--engine", "mpi", "--epochs", "1000000", "--json"]);
    arguments.extend(["--timeout", &seconds, "--flight-recorder", &path]);
    arguments.extend(flags);
    let end = Job {
        ranks: 3,
        program: Path::new("sh"),
        arguments: &arguments,
        environment: grace(timeout_ms),
        limit: Duration::from_millis(4 * timeout_ms + 23_000),
    }
    .run()?;
    let what = format!("training {flags:?} of which rank 1 stops");
    ensure!(
        end.ended == Ended::Failure && end.output.contains("found none of [1]"),
        "{what}: expected an error with `found none of [1]`, found {:?}:\n{}",
        end.ended,
        end.output
    );
    for survivor in [0, 2] {
        let recorder = folder.join(format!("flight-recorder-rank-{survivor}.json"));
        ensure!(recorder.is_file(), "{what}: expected {}:\n{}", recorder.display(), end.output);
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

/// Open MPI asks processes to end and kills them a second later, in which a machine with other work
/// may not get to writing a file: the second try gives them more.
fn grace(timeout_ms: u64) -> &'static [(&'static str, &'static str)] {
    if timeout_ms == TIMEOUTS_MS[0] {
        &[]
    } else {
        &[
            ("OMPI_MCA_odls_base_sigkill_timeout", "10"),
            ("PRTE_MCA_odls_base_sigkill_timeout", "10"),
        ]
    }
}

fn within(
    program: &Path,
    (how, collective): (&str, &str),
    culprit: usize,
    timeout_ms: u64,
    variables: &[(&str, &str)],
) -> Result<()> {
    let folder = new_folder("victim");
    let (rank, timeout) = (culprit.to_string(), timeout_ms.to_string());
    let path = folder.to_string_lossy();
    let end = Job {
        ranks: 3,
        program,
        arguments: &[how, collective, &rank, &timeout, &path],
        environment: variables,
        // Starting, twice the timeout, leaving, and Open MPI's grace.
        limit: Duration::from_millis(4 * timeout_ms + 20_000),
    }
    .run()?;
    let what = format!("rank {culprit} does `{how}` in {collective}");
    ensure!(end.ended != Ended::Never, "{what}: the job hung:\n{}", end.output);
    for survivor in (0..3).filter(|rank| *rank != culprit) {
        survived(&end, how, culprit, survivor, &folder, timeout_ms)
            .map_err(|error| error.context(format!("{what}:\n{}", end.output)))?;
    }
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}

/// Whether one survivor has done what it must.
fn survived(
    end: &End,
    how: &str,
    culprit: usize,
    survivor: usize,
    folder: &Path,
    timeout_ms: u64,
) -> Result<()> {
    let start = format!("survivor {survivor} after ");
    let said = end.output.lines().find_map(|line| line.strip_prefix(&start));
    let dump = folder.join(format!("flight-recorder-rank-{survivor}.json"));
    if let Some((after_ms, _)) = said.and_then(|said| said.split_once(" ms: ")) {
        let after_ms: u64 = after_ms.parse()?;
        ensure!(after_ms < 2 * timeout_ms, "rank {survivor} took {after_ms} ms");
    }
    let expected = match how {
        "nap" => "all is well".to_owned(),
        "stop" => format!("found none of [{culprit}]"),
        // A transfer may end because its other side has ended, and gone, because of the culprit.
        "leave" => "left the group after".to_owned(),
        _ => String::new(),
    };
    match (how, said) {
        ("kill" | "exit", None) => {
            let text = std::fs::read_to_string(&dump).unwrap_or_default();
            let whole = text.contains("\"barrier\"") && text.trim_end().ends_with('}');
            ensure!(whole, "rank {survivor}: no flight recorder at {}", dump.display());
        }
        (_, said) => {
            let said = said.unwrap_or("nothing");
            ensure!(
                said.contains(&expected),
                "rank {survivor}: expected `{expected}`, found `{said}`"
            );
            ensure!(how == "nap" || dump.exists(), "rank {survivor}: no flight recorder");
        }
    }
    Ok(())
}
