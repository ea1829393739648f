//! Files that commands write: what they replace, and what a run leaves that ends early.

use std::fs;
use std::path::Path;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

/// What a command that succeeds prints on standard error.
fn told(args: &[&str]) -> String {
    let output = fusestep(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {error}");
    error
}

#[test]
fn a_file_that_is_replaced_is_told() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let (plan, train) = (["plan", text(&shapes)], ["train", "--epochs", "1"]);
    for (command, flag) in [
        (&plan[..], "--html"),
        (&plan, "--svg"),
        (&plan, "--write-config"),
        (&train, "--report"),
        (&train, "--write-config"),
    ] {
        let file = folder.path(&format!("{}{flag}", command[0]));
        for did in ["wrote", "replaced"] {
            let found = told(&[command, &[flag, text(&file)]].concat());
            assert!(found.contains(&format!("{did} {}\n", text(&file))), "{flag}: {found}");
        }
    }
    let (params, grads) = folder.model();
    let [out, state] = ["out", "state"].map(|name| folder.path(name));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let first = ok(&step);
    assert!(first.contains(&format!("; wrote {}\n", text(&out))), "{first}");
    let second = ok(&[&step[..], &["--state-out", text(&state)]].concat());
    let told = format!("; replaced {}, wrote {}\n", text(&out), text(&state));
    assert!(second.contains(&told), "{second}");
    let third = ok(&[&step[..], &["--state-out", text(&state)]].concat());
    assert!(third.contains(&format!("; replaced {}, {}\n", text(&out), text(&state))), "{third}");
}

#[test]
fn a_file_of_flags_takes_the_place_of_no_other_file_of_the_run() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (file, out) = (folder.path("file"), folder.path("out"));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    for (command, flag, path) in [
        (&["train", "--epochs", "1", "--report", text(&file)][..], "--report", &file),
        (&["train", "--epochs", "1", "--log", text(&file)], "--log", &file),
        (&["plan", text(&params)], "the model", &params),
        (&step, "--params", &params),
        (&step, "--out", &out),
    ] {
        let error = refused(&[command, &["--write-config", text(path)]].concat());
        let said = format!("--write-config: expected another file than {flag}, found ");
        assert!(error.contains(&said), "{error}");
    }
    assert!(!file.exists() && !out.exists());
}

#[test]
#[cfg(target_os = "linux")]
fn logs_of_ranks_that_are_replaced_are_told() {
    let folder = Folder::new();
    let logs = folder.path("logs");
    for did in ["wrote", "replaced"] {
        let found = told(&["launch", "-n", "2", "--log-dir", text(&logs), "--", "true"]);
        assert!(found.contains(&format!("{did} {}/rank-0.log to", text(&logs))), "{found}");
    }
}

/// Titles of a page's charts.
fn has_chart(page: &str, title: &str) -> bool {
    page.contains(&format!("<figcaption>{title}</figcaption>"))
}

#[test]
fn a_run_that_ends_early_leaves_its_page_with_the_error() {
    let folder = Folder::new();
    let far = ["train", "--optimizer", "sgd", "--lr", "1e30", "--epochs", "2"];
    for ranks in ["1", "2"] {
        let report = folder.path(&format!("{ranks}.html"));
        let run = [&far[..], &["--ranks", ranks, "--report", text(&report)]].concat();
        let output = fusestep(&run);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("error: epoch 1: expected a finite loss"), "{error}");
        assert!(error.contains(&format!("wrote {}\n", text(&report))), "{error}");
        let page = fs::read_to_string(&report).unwrap();
        let said =
            ["The run has ended early", "error: epoch 1: expected a finite loss", "epochs = 2"];
        assert!(said.iter().all(|said| page.contains(said)), "{page}");
        assert!(has_chart(&page, "loss") && has_chart(&page, "learning rate"), "{page}");
        assert!(page.contains("<h2>Plan of the optimizer step</h2>"), "{page}");
    }
    // A run that has not begun has nothing to show.
    let never = folder.path("never.html");
    refused(&[&far[..], &["--zero", "2", "--report", text(&never)]].concat());
    let nowhere = folder.path("nowhere");
    let resume = ["--checkpoint", text(&nowhere), "--resume", "--report", text(&never)];
    refused(&[&far[..], &resume].concat());
    assert!(!never.exists());
}

#[test]
fn a_plan_of_a_checkpoint_says_which_file_it_has_read() {
    let folder = Folder::new();
    let saved = folder.path("run");
    ok(&["train", "--epochs", "1", "--checkpoint", text(&saved)]);
    let file = saved.join("step-00000045-a/model.safetensors");
    let output = fusestep(&["plan", text(&saved)]);
    let error = String::from_utf8(output.stderr).unwrap();
    let read = format!("{} is a checkpoint; its parameters are in {}", text(&saved), text(&file));
    assert!(output.status.success() && error.contains(&read), "{error}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), ok(&["plan", text(&file)]));
    let found = refused(&["plan", text(Path::new(saved.parent().unwrap()))]);
    assert!(found.contains("found a folder without a manifest.json; name a file"), "{found}");
}

#[test]
fn charts_on_a_log_scale_say_so() {
    let folder = Folder::new();
    let report = folder.path("report.html");
    let rate = ["--schedule", "constant:30:0.00001,constant"];
    ok(&[&["train", "--epochs", "1", "--report", text(&report)], &rate[..]].concat());
    let page = fs::read_to_string(&report).unwrap();
    let rate = page.split("<figcaption>learning rate</figcaption>").nth(1).unwrap();
    let rate = rate.split("</figure>").next().unwrap();
    assert!(rate.contains("update (values on a log scale)"), "{rate}");
    ok(&["train", "--epochs", "1", "--report", text(&report)]);
    let page = fs::read_to_string(&report).unwrap();
    let rate = page.split("<figcaption>learning rate</figcaption>").nth(1).unwrap();
    assert!(!rate.split("</figure>").next().unwrap().contains("log scale"));
}

/// Ranks whose last calls lie in this folder, with the calls that each has made.
fn recorded(folder: &Path) -> Vec<u64> {
    let read = |rank: usize| {
        let path = folder.join(format!("flight-recorder-rank-{rank}.json"));
        let told: serde_json::Value = serde_json::from_slice(&fs::read(path).ok()?).unwrap();
        told["calls_begun"].as_u64()
    };
    (0..3).filter_map(read).collect()
}

#[test]
fn last_calls_are_written_when_all_ranks_end_in_one_error() {
    let folder = Folder::new();
    let far = ["train", "--optimizer", "sgd", "--lr", "1e30", "--epochs", "1"];
    let launch = ["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_fusestep")];
    let processes = ["--engine", "processes"];
    for (name, before, flags) in [
        ("threads", &[][..], &["--ranks", "2"][..]),
        ("processes", &[], &["--ranks", "2", "--engine", "processes"]),
        ("launch", &launch, &processes),
    ] {
        if name != "threads" && cfg!(not(target_os = "linux")) {
            continue;
        }
        let place = folder.path(name);
        let error = refused(&[before, &far, flags, &["--flight-recorder", text(&place)]].concat());
        assert!(error.contains("expected a finite loss"), "{error}");
        let said = format!("wrote the ranks' last calls to {}", text(&place));
        assert_eq!(error.matches(&said).count(), 1, "{error}");
        let calls = recorded(&place);
        assert!(calls.len() == 2 && calls.iter().all(|&calls| calls > 2), "{name}: {calls:?}");
    }
    // A run that is refused before its first call has none.
    let never = folder.path("never");
    let refused_at_once = ["--ranks", "2", "--zero", "1", "--local-sgd", "2"];
    refused(&[&far[..], &refused_at_once, &["--flight-recorder", text(&never)]].concat());
    assert!(!never.exists());
}

#[test]
#[cfg(target_os = "linux")]
fn last_calls_are_written_when_the_launcher_is_told_to_end() {
    let folder = Folder::new();
    for signal in ["TERM", "INT"] {
        let (place, log) = (folder.path(signal), folder.path(&format!("{signal}.jsonl")));
        let program = env!("CARGO_BIN_EXE_fusestep");
        // A shell that starts tests in the background has them ignore INT, and what they start.
        let mut launcher = std::process::Command::new("env")
            .args(["--default-signal", program, "launch", "-n", "2", "--", program, "train"])
            .args(["--epochs", "100000"])
            .args(["--engine", "processes", "--log", text(&log)])
            .args(["--flight-recorder", text(&place)])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let begun = std::time::Instant::now();
        while fs::read_to_string(&log).map_or(0, |log| log.lines().count()) < 5 {
            assert!(begun.elapsed().as_secs() < 60, "no step in a minute");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let number = launcher.id().to_string();
        let kill = std::process::Command::new("kill").args(["-s", signal, &number]).status();
        assert!(kill.unwrap().success());
        let told = std::time::Instant::now();
        let ended = loop {
            match launcher.try_wait().unwrap() {
                Some(ended) => break ended,
                None if told.elapsed().as_secs() > 60 => {
                    let _ = launcher.kill();
                    panic!("{signal}: the launcher goes on for a minute");
                }
                None => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        };
        assert!(!ended.success());
        let calls = recorded(&place);
        assert!(calls.len() == 2 && calls.iter().all(|&calls| calls > 5), "{signal}: {calls:?}");
    }
}

#[test]
fn a_file_of_flags_says_what_it_needs_beside_it() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [file, out, again] = ["step.toml", "out", "again"].map(|name| folder.path(name));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    ok(&[&step[..], &["--write-config", text(&file)]].concat());
    let written = fs::read_to_string(&file).unwrap();
    let said = "# `fusestep step --config FILE --out FILE` repeats this run";
    assert!(written.starts_with(said), "{written}");
    ok(&["step", "--config", text(&file), "--out", text(&again)]);
    assert_eq!(fs::read(&out).unwrap(), fs::read(&again).unwrap());
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_of_flags_of_ranks_that_were_launched_has_their_number() {
    let folder = Folder::new();
    let file = folder.path("run.toml");
    let launch = ["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_fusestep")];
    let train = ["train", "--epochs", "1", "--engine", "processes"];
    let first = ok(&[&launch[..], &train, &["--write-config", text(&file)]].concat());
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.contains("\nranks = 2\n"), "{written}");
    let hash = |printed: &str| printed.lines().last().unwrap().to_owned();
    assert_eq!(hash(&ok(&["train", "--config", text(&file)])), hash(&first));
    assert_eq!(
        hash(&ok(&[&launch[..], &["train", "--config", text(&file)]].concat())),
        hash(&first)
    );
}

#[test]
fn a_quiet_reshard_says_one_line() {
    let folder = Folder::new();
    let [run, out] = ["run", "out"].map(|name| folder.path(name));
    ok(&["train", "--epochs", "1", "--checkpoint", text(&run)]);
    let reshard = ["checkpoint", "reshard", text(&run), "--world", "2", "-q", "--out"];
    let printed = ok(&[&reshard[..], &[text(&out)]].concat());
    assert_eq!(printed, format!("wrote {}: 18 tensors in 3 files\n", text(&out)));
}
