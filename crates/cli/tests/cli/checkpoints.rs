//! Runs saved, killed, resumed and resumed elsewhere, as a user sees them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::train;
use crate::{Folder, ok, refused, text};

#[test]
fn a_run_resumed_on_the_same_ranks_ends_with_the_same_parameters_and_on_others_goes_on() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let base = ["--ranks", "4", "--zero", "2", "--batch", "32"];
    let run = |more: &[&str]| train(&[&base, more].concat());
    let whole = run(&[]);
    let first = {
        let args = ["train", "--json", "--epochs", "1", "--checkpoint", text(&path)];
        serde_json::from_str::<Value>(&ok(&[&args[..], &base].concat())).unwrap()
    };
    assert_ne!(first["params_hash"], whole["params_hash"]);
    let saved = fs::read_to_string(path.join("manifest.json")).unwrap();
    let resumed = run(&["--checkpoint", text(&path), "--resume"]);
    assert_eq!(resumed["params_hash"], whole["params_hash"]);
    assert_ne!(fs::read_to_string(path.join("manifest.json")).unwrap(), saved);

    let verified: Value =
        serde_json::from_str(&ok(&["checkpoint", "verify", text(&path), "--json"])).unwrap();
    // One of each rank, and the model's.
    assert_eq!((&verified["intact"], &verified["shards"]), (&true.into(), &5.into()));
    assert!(ok(&["checkpoint", "inspect", text(&path)]).contains("layer0.weight@moment1"));
    let error =
        refused(&["train", "--ranks", "2", "--seed", "5", "--checkpoint", text(&path), "--resume"]);
    assert!(error.contains("seed"), "{error}");
    let error = refused(&[
        "train",
        "--ranks",
        "2",
        "--optimizer",
        "lion",
        "--checkpoint",
        text(&path),
        "--resume",
    ]);
    assert!(error.contains("optimizer"), "{error}");
    go_on_elsewhere(&folder, text(&path));
}

#[test]
fn a_resumed_run_goes_on_in_its_schedule_and_another_is_refused_by_name() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let of = ["--schedule", "warmup:10,cosine:80:0.1"];
    let resume = ["--resume", "--checkpoint", text(&path)];
    let whole = train(&of);
    ok(&[&["train", "--epochs", "1"], &of[..], &resume[1..]].concat());
    let error = refused(&[&["train", "--schedule", "warmup:5"], &resume[..]].concat());
    for word in ["`warmup:5`", "`warmup:10,cosine:80:0.1`", "step 1"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    let resumed = train(&[&of[..], &resume].concat());
    assert_eq!(resumed["params_hash"], whole["params_hash"]);
    assert_ne!(train(&[])["params_hash"], whole["params_hash"]);
    let error = refused(&["train", "--schedule", "step:0:0.1"]);
    assert!(error.contains("step:EVERY:GAMMA"), "{error}");
}

/// Writes the checkpoint for 3 ranks and trains on with 1, 2 and 3, from it and from the files as
/// they were.
fn go_on_elsewhere(folder: &Folder, path: &str) {
    let other = folder.path("resharded");
    ok(&["checkpoint", "reshard", path, "--world", "3", "--out", text(&other)]);
    for ranks in ["1", "2", "3"] {
        let mut ends = Vec::new();
        for from in [path, text(&other)] {
            let copy = tempfile::tempdir().unwrap();
            let copied = Command::new("cp").args(["-r", from]).arg(copy.path().join("c")).status();
            assert!(copied.unwrap().success());
            let at = copy.path().join("c");
            let args = [
                "train",
                "--json",
                "--epochs",
                "3",
                "--ranks",
                ranks,
                "--checkpoint",
                text(&at),
                "--resume",
            ];
            let went_on: Value = serde_json::from_str(&ok(&args)).unwrap();
            assert!(went_on["test_accuracy"].as_f64().unwrap() > 0.8);
            ends.push(went_on["params_hash"].clone());
        }
        assert_eq!(ends[0], ends[1], "{ranks} ranks");
    }
}

#[test]
fn a_local_sgd_run_averaged_by_hand_goes_on_with_other_ranks() {
    let folder = Folder::new();
    let (path, mean) = (folder.path("checkpoint"), folder.path("mean"));
    let run = |ranks: &str, more: &[&str]| {
        let base = ["train", "--local-sgd", "4", "--ranks", ranks, "--epochs"];
        [&base[..], more].concat().join(" ")
    };
    let args = run("3", &["1", "--checkpoint", text(&path)]);
    ok(&args.split(' ').collect::<Vec<_>>());
    let args = run("2", &["2", "--resume", "--checkpoint", text(&path)]);
    let error = refused(&args.split(' ').collect::<Vec<_>>());
    assert!(error.contains("reshard --average"), "{error}");
    let reshard = ["checkpoint", "reshard", text(&path), "--world", "1"];
    let written = ok(&[&reshard[..], &["--out", text(&mean), "--average"]].concat());
    assert!(written.contains("#0") && !written.contains("#1"), "{written}");
    let args = run("2", &["2", "--resume", "--checkpoint", text(&mean)]);
    ok(&args.split(' ').collect::<Vec<_>>());
    let error = refused(&[
        "checkpoint",
        "reshard",
        text(&mean),
        "--world",
        "1",
        "--average",
        "--out",
        text(&path),
    ]);
    assert!(error.contains("empty folder"), "{error}");
}

#[test]
fn a_reshard_that_is_refused_leaves_no_folder_and_takes_none_of_the_checkpoints() {
    let folder = Folder::new();
    let (path, out) = (folder.path("checkpoint"), folder.path("out"));
    ok(&["train", "--epochs", "1", "--checkpoint", text(&path)]);
    let reshard = |to: &Path, more: &[&str]| {
        let base = ["checkpoint", "reshard", text(&path), "--world", "2"];
        refused(&[&base[..], &["--out", text(to)], more].concat())
    };
    // There are no averages of ranks to average.
    reshard(&out, &["--average"]);
    assert!(!out.exists());
    fs::create_dir(&out).unwrap();
    reshard(&out, &["--average"]);
    assert!(out.exists(), "a folder of the user's is gone");
    let entries = fs::read_dir(&path).unwrap();
    let names = entries.map(|entry| entry.unwrap().path());
    let is_generation = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("step-")
    };
    let generation = names.into_iter().find(is_generation).unwrap();
    let error = reshard(&generation.join("new"), &[]);
    assert!(error.contains("it would be lost"), "{error}");
    assert!(!generation.join("new").exists());
    ok(&["checkpoint", "verify", text(&path)]);
}

/// Waits for the first saves of a run, none to three, as its manifest tells of them, and then for
/// some of the time that one takes it now, in an order that jumps: other work on the machine has
/// made the run slower or faster than any that was timed before.
fn wait_in_a_save(run: &mut Child, path: &Path, round: u64) {
    let manifest = || fs::read(path.join("manifest.json")).ok();
    let (mut last, mut saves, mut begun, start) = (manifest(), 0, None, Instant::now());
    let mut pace = Duration::from_millis(5);
    while saves < round % 4 || begun.is_none() {
        if run.try_wait().unwrap().is_some() || start.elapsed() > Duration::from_secs(60) {
            return;
        }
        if begun.is_none() && path.exists() {
            begun = Some(Instant::now());
        }
        let found = manifest();
        if let Some(begun) = begun.filter(|_| found != last) {
            (last, saves) = (found, saves + 1);
            pace = begun.elapsed() / saves as u32;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    std::thread::sleep(pace * (round * 7 % 16) as u32 / 16);
}

/// Kills a run that saves after every update at random instants and resumes it, until `kills` have
/// met it running; then lets it end.
fn kill_and_resume(kills: u64, more: &[&str]) {
    let folder = Folder::new();
    let (path, scratch) = (folder.path("checkpoint"), folder.path("scratch"));
    let base = ["train", "--json", "--epochs", "1", "--batch", "64"];
    let base = [&base[..], more, &["--ranks", "2", "--save-every", "1", "--checkpoint"]].concat();
    let hash = |text: &str| serde_json::from_str::<Value>(text).unwrap()["params_hash"].clone();
    let whole = hash(&ok(&[&base[..], &[text(&scratch)]].concat()));
    let (mut killed, mut saved) = (0, 0);
    for round in 0.. {
        if killed == kills {
            break;
        }
        assert!(round < 4 * kills, "{killed} killed in {round} rounds");
        let resumes = path.join("manifest.json").exists();
        saved += u64::from(resumes);
        let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.args(&base).arg(&path).stdout(Stdio::piped());
        let mut run = command.args(resumes.then_some("--resume")).spawn().unwrap();
        wait_in_a_save(&mut run, &path, round);
        // SIGKILL: nothing of the process runs after it.
        run.kill().unwrap();
        let output = run.wait_with_output().unwrap();
        if output.status.success() {
            let found = hash(&String::from_utf8(output.stdout).unwrap());
            assert_eq!(found, whole, "round {round}");
            fs::remove_dir_all(&path).unwrap();
            continue;
        }
        killed += 1;
        if path.join("manifest.json").exists() {
            ok(&["checkpoint", "verify", text(&path)]);
        }
    }
    assert!(saved > 0, "{killed} killed, {saved} resumed");
    let resume: &[&str] = if path.join("manifest.json").exists() { &["--resume"] } else { &[] };
    let ended = ok(&[&base[..], &[text(&path)], resume].concat());
    assert_eq!(hash(&ended), whole);
}

#[test]
fn a_run_killed_at_any_instant_resumes_to_the_same_parameters() {
    kill_and_resume(12, &["--zero", "2"]);
}

#[test]
fn runs_killed_between_micro_steps_and_between_averages_resume_to_the_same_parameters() {
    kill_and_resume(6, &["--zero", "2", "--accumulate", "5"]);
    kill_and_resume(6, &["--local-sgd", "4"]);
}

#[test]
#[ignore = "minutes; run with --ignored"]
fn a_run_killed_at_200_instants_resumes_to_the_same_parameters() {
    kill_and_resume(200, &["--zero", "2"]);
}

#[test]
fn a_damaged_checkpoint_ends_a_resumed_run_and_stays_as_it_is() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let base =
        ["train", "--batch", "512", "--ranks", "2", "--zero", "1", "--checkpoint", text(&path)];
    let run = |more: &[&'static str]| [&base, more].concat();
    ok(&run(&["--epochs", "1"]));
    let manifest = fs::read_to_string(path.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    let shard = path.join(manifest["generation"].as_str().unwrap()).join("shard-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 16;
    fs::write(&shard, &bytes).unwrap();
    let error = refused(&run(&["--epochs", "2", "--resume"]));
    assert!(error.contains("shard-00001") && error.contains('@'), "{error}");
    assert_eq!(fs::read(&shard).unwrap(), bytes);
}

#[test]
fn a_resumed_run_tells_its_own_steps_from_those_before() {
    let folder = Folder::new();
    let (path, page) = (folder.path("checkpoint"), folder.path("page.html"));
    let run = |epochs: &str, more: &[&str]| {
        let base = ["train", "--checkpoint", text(&path), "--epochs", epochs];
        ok(&[&base[..], more].concat())
    };
    let scaled = ["--dtype", "f16", "--loss-scale", "8.507059173023462e37"];
    run("2", &scaled);
    let resume = [&["--resume"], &scaled[..]].concat();
    let told = run("3", &resume);
    let line = "3 epochs, 2 of them before this session; 45 steps in it: loss ";
    // Of its own steps.
    assert!(told.contains(line) && told.contains("\n45 steps skipped"), "{told}");
    let report = [&resume[..], &["--report", text(&page)]].concat();
    let told = run("1", &report);
    let line = "nothing was done: the checkpoint is at epoch 3, and --epochs asks for 1: loss ";
    assert!(told.contains(line), "{told}");
    let page = fs::read_to_string(&page).unwrap();
    for unmeasured in ["NaN", "0 ns", "0 images", "per step:", "in the step"] {
        assert!(!told.contains(unmeasured), "{unmeasured}: {told}");
        assert!(!page.contains(unmeasured), "{unmeasured}: {page}");
    }
    let json: Value =
        serde_json::from_str(&run("1", &[&resume[..], &["--json"]].concat())).unwrap();
    let of = |key: &str| json[key].clone();
    assert_eq!((of("epochs"), of("resumed_epochs")), (1.into(), 3.into()));
    assert_eq!((of("steps"), of("history")), (0.into(), Value::Array(Vec::new())));
    assert_eq!((of("skipped_steps"), of("candle_ns_per_step")), (0.into(), Value::Null));
    assert_eq!(of("tokens"), "images");
    assert!(of("final_loss").as_f64().unwrap() > 0.0);
}

#[test]
fn a_checkpoint_that_is_not_there_is_not_begun_by_resuming_it() {
    let folder = Folder::new();
    let (none, empty) = (folder.path("none"), folder.path("empty"));
    fs::create_dir(&empty).unwrap();
    for (path, found) in [(&none, "no such folder"), (&empty, "without a manifest.json")] {
        for ranks in ["1", "2"] {
            let train = ["train", "--epochs", "1", "--ranks", ranks, "--resume"];
            let error = refused(&[&train[..], &["--checkpoint", text(path)]].concat());
            let expected = "expected a checkpoint to go on from, found ";
            assert!(error.contains(expected) && error.contains(found), "{error}");
            assert_eq!(error.matches(expected).count(), 1, "{error}");
        }
    }
    let reshard = ["checkpoint", "reshard", text(&none), "--world", "2"];
    refused(&[&reshard[..], &["--out", text(&folder.path("out"))]].concat());
    assert_eq!((folder.files(), fs::read_dir(&empty).unwrap().count()), (1, 0));
}

#[test]
#[cfg(unix)]
fn what_lies_where_a_checkpoint_should_is_named() {
    let folder = Folder::new();
    let at = |name: &str| folder.path(name);
    fs::write(at("file"), "precious").unwrap();
    std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
    std::os::unix::fs::symlink("loop", at("loop")).unwrap();
    for (path, found) in [
        (at("file"), "found a file; give another path".to_owned()),
        (at("dangling"), "found a link that leads nowhere;".to_owned()),
        (at("loop"), "found a link that cannot be followed".to_owned()),
        (at("file/below"), format!("found a file at {};", at("file").display())),
    ] {
        let error = refused(&["train", "--epochs", "1", "--checkpoint", text(&path)]);
        let expected = "expected a folder, or a place for a new one, ";
        assert!(error.contains(expected) && error.contains(&found), "{error}");
    }
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "precious");
}
