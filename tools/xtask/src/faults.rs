//! `faults`: the command itself, with an error or its death at every call that opens or changes a
//! file, one after the other.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use crate::commands::{cargo, must};
use crate::folders::{copy, empty, files_below};
use crate::{target_folder, workspace_root};

/// What happens at a call.
const KINDS: [&str; 4] = ["EIO", "ENOSPC", "DEATH", "DEATH_AFTER"];

/// Calls after which a command that still has some is one that never ends.
const MOST_CALLS: usize = 2_000;

/// Runs every scenario for every call and kind of fault.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("expected `faults`, found {arguments:?}");
    }
    let bench = Bench::prepare()?;
    let mut all = 0;
    for (name, scenario) in [
        ("step", step as fn(&Bench) -> Result<Scenario>),
        ("step in two folders, then days and others", step_then_days),
        ("step, then one on a file alone", step_then_alone),
        ("step, then a backup", step_then_backup),
        ("save", save),
        ("resume", resume),
        ("reshard", reshard),
    ] {
        let scenario = scenario(&bench)?;
        let (mut calls, mut faults) = (0, 0);
        for kind in KINDS {
            for at in 0.. {
                ensure!(at < MOST_CALLS, "{name}: more than {MOST_CALLS} calls");
                let fired = bench
                    .try_one(&scenario, kind, at)
                    .with_context(|| format!("{name}: {kind} at call {at}"))?;
                if !fired {
                    calls = calls.max(at);
                    break;
                }
                faults += 1;
            }
        }
        ensure!(calls > 5, "{name}: expected calls that open or change files, found {calls}");
        println!("faults: {name}: {calls} calls, {faults} faults, every end as promised");
        all += faults;
    }
    println!("faults: all is well after {all} of them");
    Ok(())
}

/// The program, the library of faults and a folder for both.
struct Bench {
    program: PathBuf,
    library: PathBuf,
    root: PathBuf,
}

/// What is run under faults, and what must be true afterwards.
struct Scenario {
    /// What lies in the folder beforehand.
    template: PathBuf,
    arguments: Vec<String>,
    /// Judges the folder after the command has ended so.
    judge: Judge,
}

/// Whether a folder is as promised after a command that ended so.
type Judge = Box<dyn Fn(&Bench, &Path, &Output) -> Result<()>>;

/// Where a scenario's files lie while a command runs, in its arguments.
const HERE: &str = "@";

impl Bench {
    fn prepare() -> Result<Self> {
        let root = target_folder().join("faults");
        empty(&root)?;
        must(&mut cargo("build --release -p fusestep-cli"), "the command does not build")?;
        let library = root.join("faults.so");
        let mut compiler = Command::new("c++");
        compiler
            .args(["-shared", "-fPIC", "-O1", "-std=c++17", "-o"])
            .arg(&library)
            .arg(workspace_root().join("tools/xtask/faults/faults.cpp"))
            .arg("-ldl");
        must(&mut compiler, "the library of faults does not build")?;
        Ok(Self {
            program: target_folder().join("release/fusestep"),
            library,
            root: root.canonicalize()?,
        })
    }

    /// Runs the command with nothing in its way.
    fn plain(&self, folder: &Path, arguments: &[String]) -> Result<Output> {
        Ok(Command::new(&self.program).args(placed(folder, arguments)).output()?)
    }

    /// Runs the command likewise, which must end well; what it printed.
    fn must(&self, folder: &Path, arguments: &[String]) -> Result<String> {
        let output = self.plain(folder, arguments)?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?} without faults: {error}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Requires that the folder's checkpoint is whole.
    fn verify(&self, folder: &Path) -> Result<()> {
        self.must(folder, &split("checkpoint verify @/c"))?;
        Ok(())
    }

    /// A folder with the checkpoint of one epoch.
    fn trained(&self, name: &str) -> Result<PathBuf> {
        let folder = self.empty(name)?;
        self.must(&folder, &training("1", ""))?;
        Ok(folder)
    }

    /// Runs a scenario with one fault; whether the fault came to happen.
    fn try_one(&self, scenario: &Scenario, kind: &str, at: usize) -> Result<bool> {
        let folder = self.fresh("run", &scenario.template)?;
        let fired = self.root.join("fired");
        let _ = fs::remove_file(&fired);
        let output = Command::new(&self.program)
            .args(placed(&folder, &scenario.arguments))
            .env("LD_PRELOAD", &self.library)
            .env("FAULT_ROOT", &folder)
            .env("FAULT_AT", at.to_string())
            .env("FAULT_KIND", kind)
            .env("FAULT_FIRED", &fired)
            .output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        let killed = output.status.code().is_none();
        ensure!(
            !error.contains("panicked") && killed == (kind.starts_with("DEATH") && fired.exists()),
            "ended by {:?}: {error}",
            output.status
        );
        ensure!(
            output.status.success() || killed || error.contains("error: "),
            "failed without a word: {error}"
        );
        (scenario.judge)(self, &folder, &output)?;
        Ok(fired.exists())
    }

    /// A copy of a folder.
    fn fresh(&self, name: &str, template: &Path) -> Result<PathBuf> {
        let folder = self.root.join(name);
        copy(template, &folder)?;
        Ok(folder)
    }

    fn empty(&self, name: &str) -> Result<PathBuf> {
        let folder = self.root.join(name);
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }
}

fn placed(folder: &Path, arguments: &[String]) -> Vec<String> {
    let here = folder.to_string_lossy();
    arguments.iter().map(|text| text.replace(HERE, &here)).collect()
}

/// The arguments of a command line.
fn split(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// A safetensors file of one tensor.
fn tensor_file(path: &Path, values: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = format!(
        "{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}],\"data_offsets\":[0,{}]}}}}",
        values.len(),
        bytes.len()
    );
    let length = (header.len() as u64).to_le_bytes();
    Ok(fs::write(path, [&length[..], header.as_bytes(), &bytes].concat())?)
}

/// What happens in a folder between a step that has failed and the next one.
type Meanwhile = fn(&Bench, &Path) -> Result<()>;

/// Parameters and state replaced in place: both old or both new, and an error means old.
fn step(bench: &Bench) -> Result<Scenario> {
    step_with(bench, "s", |_, _| Ok(()))
}

/// A step in two folders; days pass, and others write into both before the next step comes.
fn step_then_days(bench: &Bench) -> Result<Scenario> {
    step_with(bench, "there/s", |bench, folder| {
        let two_days = Duration::from_secs(2 * 24 * 60 * 60);
        for path in hidden(folder)? {
            // A second name of a file that was there before has that file's age.
            if fs::metadata(&path)?.nlink() == 1 {
                let file = fs::File::options().write(true).open(&path)?;
                file.set_modified(SystemTime::now() - two_days)?;
            }
        }
        for out in ["@/n", "@/there/n"] {
            let beside = format!("step --params @/q --grads @/g --lr 0.01 --out {out}");
            bench.must(folder, &split(&beside)).context("a step beside the files")?;
        }
        Ok(())
    })
}

/// The command's hidden files in a folder and below.
fn hidden(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = files_below(folder)?;
    files.retain(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".fusestep-"))
    });
    Ok(files)
}

/// [`step`] with the state in such a file, and what happens before the next step.
fn step_with(bench: &Bench, state: &'static str, meanwhile: Meanwhile) -> Result<Scenario> {
    let template = bench.empty(&format!("step of {}", state.replace('/', " ")))?;
    fs::create_dir_all(template.join("there"))?;
    let values: Vec<f32> = (0..500).map(|at| at as f32 / 64.0 - 3.0).collect();
    for name in ["p", "g", "q"] {
        tensor_file(&template.join(name), &values)?;
    }
    let base = format!("step --params @/p --grads @/g --lr 0.01 --out @/p --state-out @/{state}");
    bench.must(&template, &split(&base))?;
    let again = split(&format!("{base} --state @/{state}"));
    let pair = move |folder: &Path| -> Result<[Vec<u8>; 2]> {
        Ok([fs::read(folder.join("p"))?, fs::read(folder.join(state))?])
    };
    // The folder after no, one and two steps more.
    let mut after = vec![pair(&template)?];
    let folder = bench.fresh("run", &template)?;
    for _ in 0..2 {
        bench.must(&folder, &again)?;
        after.push(pair(&folder)?);
    }
    let arguments = again.clone();
    let judge: Judge = Box::new(move |bench, folder, output| {
        meanwhile(bench, folder)?;
        // Whoever comes next finishes what was begun, if it counts.
        bench.must(folder, &again).context("the next step")?;
        let found = pair(folder)?;
        let steps = after.iter().position(|pair| *pair == found);
        let possible: &[usize] = match output.status.code() {
            Some(0) => &[2],
            Some(_) => &[1],
            None => &[1, 2],
        };
        ensure!(
            steps.is_some_and(|steps| possible.contains(&steps)),
            "expected {possible:?} steps in parameters and state alike, found {steps:?}"
        );
        let left = hidden(folder)?;
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    });
    Ok(Scenario { template, arguments, judge })
}

/// A step on both files, and the same on one of them alone: what the second one has written stays
/// there, whatever was left to finish.
fn step_then_alone(bench: &Bench) -> Result<Scenario> {
    let Scenario { template, arguments, .. } = step(bench)?;
    let alone = split("step --params @/p --grads @/g --lr 0.01 --out @/p");
    let of_state = split(
        "step --params @/p --grads @/g --lr 0.01 --state @/s --any-parameters --out @/o \
         --state-out @/s",
    );
    // The parameters after no or one step with state, and one without.
    let folder = bench.fresh("run", &template)?;
    let mut possible = Vec::new();
    for _ in 0..2 {
        let p = folder.join("p");
        let before = fs::read(&p)?;
        bench.must(&folder, &alone)?;
        possible.push(fs::read(&p)?);
        fs::write(&p, before)?;
        bench.must(&folder, &arguments)?;
    }
    let judge: Judge = Box::new(move |bench, folder, output| {
        bench.must(folder, &alone).context("a step on the parameters alone")?;
        let written = fs::read(folder.join("p"))?;
        let steps = possible.iter().position(|found| *found == written);
        let right = match output.status.code() {
            Some(0) => steps == Some(1),
            Some(_) => steps == Some(0),
            None => steps.is_some(),
        };
        ensure!(right, "expected one step more than there were, found {steps:?}");
        bench.must(folder, &of_state).context("a step on the state alone")?;
        ensure!(fs::read(folder.join("p"))? == written, "an acknowledged step was taken back");
        Ok(())
    });
    Ok(Scenario { template, arguments, judge })
}

/// A step on both files, which are put back from a backup then: the next step goes on from there.
fn step_then_backup(bench: &Bench) -> Result<Scenario> {
    let Scenario { template, arguments, .. } = step(bench)?;
    let folder = bench.fresh("run", &template)?;
    bench.must(&folder, &arguments)?;
    let pair = |folder: &Path| -> Result<[Vec<u8>; 2]> {
        Ok([fs::read(folder.join("p"))?, fs::read(folder.join("s"))?])
    };
    let (old, new, again) = (pair(&template)?, pair(&folder)?, arguments.clone());
    let judge: Judge = Box::new(move |bench, folder, _| {
        for (name, bytes) in ["p", "s"].iter().zip(&old) {
            fs::write(folder.join(name), bytes)?;
        }
        bench.must(folder, &again).context("the next step")?;
        ensure!(pair(folder)? == new, "expected one step from the backup, found another end");
        Ok(())
    });
    Ok(Scenario { template, arguments, judge })
}

/// The arguments of a run of so many epochs, and its own flags.
fn training(epochs: &str, more: &str) -> Vec<String> {
    split(&format!(
        "train --json --ranks 2 --zero 1 --batch 256 --epochs {epochs} --checkpoint @/c {more}"
    ))
}

fn hash(output: &str) -> Result<String> {
    let value: serde_json::Value = serde_json::from_str(output)?;
    Ok(value["params_hash"].as_str().context("no hash")?.to_owned())
}

/// Steps of a folder's checkpoint, 0 without one.
fn saved_steps(folder: &Path) -> Result<u64> {
    let manifest = folder.join("c/manifest.json");
    if !manifest.exists() {
        return Ok(0);
    }
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(manifest)?)?;
    manifest["step"].as_u64().context("no step")
}

/// The run that comes next: it goes on from a checkpoint if there is one.
fn next_run(folder: &Path, epochs: &str) -> Result<Vec<String>> {
    let goes_on = saved_steps(folder)? > 0;
    Ok(training(epochs, if goes_on { "--resume" } else { "" }))
}

/// A judge of runs: whatever happened, what was acknowledged is there, and the run goes on from it
/// to the parameters of one that nothing has happened to.
fn goes_on(bench: &Bench, template: &Path, epochs: &'static str) -> Result<Judge> {
    let before = saved_steps(template)?;
    let folder = bench.fresh("run", template)?;
    let expected = hash(&bench.must(&folder, &next_run(&folder, epochs)?)?)?;
    let after = saved_steps(&folder)?;
    ensure!(after > before, "expected steps beyond {before}, found {after}");
    Ok(Box::new(move |bench, folder, output| {
        let found = saved_steps(folder)?;
        // A run that ends well has acknowledged its last save, any other has at least kept what it
        // began with.
        let least = if output.status.success() { after } else { before };
        ensure!(
            (least..=after).contains(&found),
            "expected a checkpoint of {least} to {after} steps, found one of {found}"
        );
        if found > 0 {
            bench.verify(folder)?;
        }
        let next = bench.must(folder, &next_run(folder, epochs)?);
        let found = hash(&next.context("the next run")?)?;
        ensure!(found == expected, "expected parameters {expected}, found {found}");
        bench.verify(folder)?;
        Ok(())
    }))
}

/// A run that saves for the first time.
fn save(bench: &Bench) -> Result<Scenario> {
    let template = bench.empty("save")?;
    let judge = goes_on(bench, &template, "1")?;
    Ok(Scenario { template, arguments: training("1", ""), judge })
}

/// A run that goes on and replaces its checkpoint.
fn resume(bench: &Bench) -> Result<Scenario> {
    let template = bench.trained("resume")?;
    let judge = goes_on(bench, &template, "2")?;
    Ok(Scenario { template, arguments: training("2", "--resume"), judge })
}

/// A checkpoint written for other ranks: it is there and whole, or is not; the one it comes from
/// stays.
fn reshard(bench: &Bench) -> Result<Scenario> {
    let template = bench.trained("reshard")?;
    let arguments = split("checkpoint reshard @/c --world 3 --out @/other");
    let judge: Judge = Box::new(|bench, folder, output| {
        bench.verify(folder)?;
        let verified = bench.plain(folder, &split("checkpoint verify @/other"))?;
        let there = folder.join("other/manifest.json").exists();
        ensure!(
            verified.status.success() == there,
            "{}",
            String::from_utf8_lossy(&verified.stderr)
        );
        ensure!(there || !output.status.success(), "done, and not there");
        Ok(())
    });
    Ok(Scenario { template, arguments, judge })
}
