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
