//! Files of flags: `--config` takes them, `--write-config` and reports give them.

use std::fs;

use serde_json::Value;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

/// The last line of a run, which has the hash of the parameters.
fn hash(printed: &str) -> &str {
    printed.lines().last().unwrap()
}

#[test]
fn a_run_is_repeated_from_the_file_that_it_writes_and_typed_flags_win() {
    let folder = Folder::new();
    let (file, report) = (folder.path("run.toml"), folder.path("report.html"));
    let flags = ["--epochs", "1", "--lr", "1e-3", "--clip-norm", "0.5", "--update-norms"];
    let flags =
        [&flags[..], &["--exclude", "bias", "--exclude", "layer0", "--weight-decay", "0.1"]];
    let wrote = ["--write-config", text(&file), "--report", text(&report)];
    let first = ok(&[&["train"], &flags.concat()[..], &wrote].concat());
    let written = fs::read_to_string(&file).unwrap();
    for line in ["clip-norm = 0.5", "epochs = 1", "update-norms = true", "seed = 1"] {
        assert!(written.lines().any(|found| found == line), "{line}: {written}");
    }
    assert!(written.contains(r#"exclude = ["bias", "layer0"]"#), "{written}");
    let page = fs::read_to_string(&report).unwrap();
    assert!(page.contains("update-norms = true"));
    // What the run wrote stays as it is when the run is repeated.
    let told =
        format!("# What this run wrote, and would write over:\n# report = {:?}", text(&report));
    assert!(written.ends_with(&format!("{told}\n")), "{written}");
    assert!(page.contains("would write over:\n# report = "), "{page}");
    let again = fusestep(&["train", "--config", text(&file)]);
    assert_eq!(hash(&String::from_utf8(again.stdout).unwrap()), hash(&first));
    assert!(!String::from_utf8(again.stderr).unwrap().contains("report.html"));
    assert_eq!(fs::read_to_string(&report).unwrap(), page);
    let other = ok(&["train", "--config", text(&file), "--clip-norm", "5", "--json"]);
    let other: Value = serde_json::from_str(&other).unwrap();
    assert!(!hash(&first).contains(other["params_hash"].as_str().unwrap()));
    let told = other["config"].as_str().unwrap();
    assert!(told.contains("clip-norm = 5\n") && told.contains(r#"lr = "1e-3""#), "{told}");
}

#[test]
fn each_command_of_steps_takes_a_file_and_what_it_needs_from_it() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (shapes, file, out) = (shapes(&folder), folder.path("run.toml"), folder.path("out"));
    let quoted = |path: &std::path::Path| format!("{:?}", text(path));
    fs::write(&file, format!("model = {}\nworld = 4\nzero = 1\n", quoted(&shapes))).unwrap();
    assert!(ok(&["plan", "--config", text(&file)]).contains("4 ranks, zero stage 1"));
    assert!(ok(&["plan", "--config", text(&file), "--zero", "2"]).contains("zero stage 2"));
    // A list that is typed takes the place of the file's; an earlier flag that of its setting.
    let more = "exclude = [\"a\"]\nlocal-sgd = 4\nlocal-sgd-interval = \"fixed\"\n";
    fs::write(&file, format!("{more}model = {}\nworld = 4\n", quoted(&shapes))).unwrap();
    ok(&["plan", "--config", text(&file), "--exclude", "b", "--adaptive"]);
    fs::write(&file, "sizes = [\"4KiB\"]\ncollective = \"all-reduce\"\n").unwrap();
    assert!(ok(&["bench", "--config", text(&file)]).contains("4,096 B"));
    let paths = [("params", &params), ("grads", &grads), ("out", &out)];
    let lines = paths.map(|(key, path)| format!("{key} = {}\n", quoted(path)));
    fs::write(&file, lines.concat() + "steps = 2\n").unwrap();
    assert!(ok(&["step", "--config", text(&file)]).starts_with("2 adamw steps"));
    assert!(ok(&["step", "--config", text(&file), "--steps", "3"]).starts_with("3 adamw steps"));
}

#[test]
fn files_of_flags_with_a_fault_are_refused_by_key_or_line() {
    let folder = Folder::new();
    let file = folder.path("run.toml");
    for (content, expected) in [
        ("cilp-norm = 1.0", "`cilp-norm`: expected the name of a flag of train"),
        ("cilp-norm = 1.0", "did you mean `clip-norm`?"),
        ("clip_norm = 1.0", "did you mean `clip-norm`?"),
        ("zzz = 1", "`fusestep train --help` lists them"),
        ("config = \"x\"", "without its dashes, found no such flag; `fusestep train --help` lists"),
        ("json = 1", "`json`: expected true or false, found 1"),
        ("epochs = [1, 2]", "`epochs`: expected one value, found the list [1, 2]"),
        ("epochs = {a = 1}", "`epochs`: expected a number or a text"),
        ("epochs = 1\nlr = \n", "run.toml:2: expected TOML with a flag a line"),
        ("epochs = \"many\"", "invalid value 'many' for '--epochs <EPOCHS>'"),
        ("epochs = \"many\"", "note: --epochs stands in "),
        ("lr = -1", "lr: expected a finite value of at least 0, found -1"),
    ] {
        fs::write(&file, content).unwrap();
        let error = refused(&["train", "--config", text(&file)]);
        assert!(error.contains(expected), "{content}: {error}");
    }
    let error = refused(&["train", "--config", text(&folder.path("none"))]);
    assert!(error.contains("--config") && error.contains("none"), "{error}");
    let place = folder.path("no/folder/run.toml");
    let trained = fusestep(&["train", "--epochs", "1", "--write-config", text(&place)]);
    let error = String::from_utf8_lossy(&trained.stderr).into_owned();
    assert!(!trained.status.success() && trained.stdout.is_empty(), "{error}");
    assert!(error.contains("--write-config"), "{error}");
}
