//! Messages that name the flag, both sides and what would work.

use std::fs;

use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::{Folder, fusestep, ok, refused, text};

/// Shapes of a few parameters.
pub(crate) fn shapes(folder: &Folder) -> std::path::PathBuf {
    let path = folder.path("shapes.json");
    let content = r#"[{"name":"a","shape":[4]},{"name":"b","shape":[70000]}]"#;
    fs::write(&path, content).unwrap();
    path
}

/// A command, a flag, its value and what the error says.
type Refusal<'a> = (&'a [&'a str], &'a str, &'a str, &'a str);

/// Runs all of them, which must be refused after the flag.
fn refuse(all: &[Refusal<'_>]) {
    for &(command, flag, value, expected) in all {
        let error = refused(&[command, &[flag, value]].concat());
        let named = flag.trim_start_matches('-');
        assert!(error.contains(named) && error.contains(expected), "{flag} {value}: {error}");
    }
}

const U64S: &str = "a number from 0 to 18446744073709551615";
const COUNTS: &str = "a number from 1 to 18446744073709551615";
const SIZES: &str = "<N>': expected a number from 1 to 65536";

#[test]
fn values_of_plans_out_of_range_are_refused_after_their_flag() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = ["plan", text(&shapes)];
    let world = ["plan", text(&shapes), "--world", "2"];
    let free = ["plan", text(&shapes), "--optimizer", "schedule-free"];
    refuse(&[
        (&free, "--beta1", "1", "expected a value in (0, 1), found 1"),
        (&free, "--beta1", "0", "expected a value in (0, 1), found 0"),
        (&free, "--warmup-steps", "-1", "from 0 to 4294967295"),
        (&plan, "--clip-norm", "0", "expected a finite number above 0"),
        (&plan, "--clip-norm", "NaN", "expected a finite number above 0"),
        (&world, "--bucket-cap-mib", "-1", "expected a finite number above 0"),
        (&plan, "--rounding-seed", "-1", "a whole number from 0 on"),
        (&plan, "--argument-bytes", "-1", "a whole number from 1 on"),
        (&plan, "--world", "-1", "a number from 1 to 65536"),
        (&plan, "--zero", "-1", "a whole number from 0 to 3"),
        (&plan, "--shard-group", "-1", "a whole number from 1 on"),
    ]);
}

#[test]
fn values_of_runs_out_of_range_are_refused_after_their_flag() {
    let (train, ranks) = (["train"], ["train", "--ranks", "2"]);
    let transformer = ["train", "--model", "transformer"];
    let saved = ["train", "--checkpoint", "none"];
    let reshard = ["checkpoint", "reshard", "none"];
    refuse(&[
        (&train, "--seed", "-1", U64S),
        (&train, "--threads", "-1", "threads from 1 to 256"),
        (&ranks, "--timeout", "-1", "seconds above 0, 86400 at most"),
        (&ranks, "--local-sgd", "0", "a whole number from 1 on"),
        (&ranks, "--compare-parameters", "-1", COUNTS),
        (&saved, "--save-every", "-1", COUNTS),
        (&["launch"], "-n", "-1", "a number from 1 to 1024"),
        (&reshard, "--world", "-1", "a number from 1 to 65536"),
        (&transformer, "--context", "100000", SIZES),
        (&transformer, "--layers", "0", SIZES),
        (&transformer, "--heads", "-1", SIZES),
        (&transformer, "--width", "3", "multiple of the 4 of --heads"),
    ]);
}

#[test]
fn a_gradient_of_a_tensor_that_is_no_parameter_is_told_its_type() {
    let folder = Folder::new();
    let (params, grads) = (folder.path("params"), folder.path("grads"));
    let out = folder.path("out");
    for (dtype, len_bytes, named) in [(Dtype::I32, 4, "i32"), (Dtype::BOOL, 1, "bool")] {
        for path in [&params, &grads] {
            let (one, zeros) = (1f32.to_le_bytes(), vec![0; len_bytes]);
            let tensors = [
                ("a", TensorView::new(Dtype::F32, vec![1], &one).unwrap()),
                ("w", TensorView::new(dtype, vec![1], &zeros).unwrap()),
            ];
            fs::write(path, serialize(tensors, None).unwrap()).unwrap();
        }
        let files = ["--params", text(&params), "--grads", text(&grads)];
        let error = refused(&[&["step"][..], &files, &["--out", text(&out)]].concat());
        let found = format!("found a tensor of {named}, which takes no step");
        assert!(
            error.contains("gradient `w`: expected a parameter of f32") && error.contains(&found),
            "{error}"
        );
        assert!(!out.exists());
    }
}

#[test]
fn what_was_typed_is_quoted_short_and_in_one_line() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let long = "x".repeat(5_000);
    for args in [
        vec!["train", "--epochs", &long],
        vec!["train", "--optimizer", &long],
        vec!["plan", text(&shapes), "--loss-scale", &long],
        vec!["plan", text(&shapes), "--schedule", &long],
        vec!["plan", text(&shapes), &long],
        vec![&long],
        vec!["train", &format!("--{long}")],
    ] {
        let error = refused(&args);
        let start = &error[..error.len().min(2_000)];
        assert!(error.len() < 2_000 && error.contains("xxx"), "{}: {start}", error.len());
    }
    let odd = "a\nerror: forged\u{1b}[2J";
    let at = format!("--epochs={odd}");
    for args in [vec!["train", &at], vec!["plan", odd], vec!["checkpoint", "verify", odd]] {
        let error = refused(&args);
        assert!(
            error.contains("a\\u{a}error: forged\\u{1b}[2J") && !error.contains("\nerror"),
            "{error:?}"
        );
    }
    let out = format!("--out={}", text(&folder.path("no\nfolder/out")));
    let (params, grads) = folder.model();
    let files = ["--params", text(&params), "--grads", text(&grads)];
    let error = refused(&[&["step"][..], &files, &[&out]].concat());
    assert!(error.contains("no\\u{a}folder") && error.lines().count() == 1, "{error:?}");
    // What is asked for is printed as it is.
    assert!(ok(&["train", "--help"]).contains("\n      --epochs"));
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = ["plan", text(&shapes)];
    for flags in [
        &["--latency-us", "7"][..],
        &["--bandwidth-gbs", "7"],
        &["--scatter-gbs", "7"],
        &["--gather-gbs", "7"],
        &["--memory-gbs", "7"],
        &["--backward-ms", "5"],
        &["--measure"],
    ] {
        let error = refused(&[&plan[..], flags].concat());
        assert!(error.contains("--world <N>"), "{flags:?}: {error}");
        ok(&[&plan[..], flags, &["--world", "2"]].concat());
    }
    let error = refused(&["train", "--compare-parameters", "3"]);
    let expected = "--compare-parameters: expected --ranks too, found no such flag";
    assert!(error.contains(expected), "{error}");
    let compare = ["--ranks", "2", "--compare-parameters", "3"];
    ok(&[&["train", "--epochs", "1"], &compare[..]].concat());
    // An engine asks for ranks, as many as it has where none are named.
    let bench = ["bench", text(&shapes), "--rounds", "1", "--engine", "thread"];
    assert!(ok(&bench).contains("2 ranks (thread)"));
}

#[test]
fn buffers_have_an_element_at_least() {
    let sizes = |sizes| ["bench", "--collective", "all-reduce", "--sizes", sizes];
    for size in ["3B", "0", "4KiB,3B"] {
        let error = refused(&sizes(size));
        assert!(error.contains("from 4 to 17179869184"), "{size}: {error}");
    }
    assert!(ok(&sizes("4")).contains(" 4 B "));
}

#[test]
fn reducing_apart_asks_for_ranks() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    for (command, flag) in [(&["plan", text(&shapes)][..], "--world"), (&["train"], "--ranks")] {
        let error = refused(&[command, &["--apart"]].concat());
        assert!(error.contains(&format!("--separate: expected {flag}")), "{error}");
    }
    for (command, flag) in [
        (&["plan", text(&shapes)][..], "--world"),
        (&["train", "--epochs", "1"], "--ranks"),
        (&["bench", text(&shapes), "--rounds", "1"], "--ranks"),
    ] {
        let output = fusestep(&[command, &[flag, "1", "--apart"]].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        let note = "note: --separate: no effect on one rank";
        assert!(output.status.success() && error.contains(note), "{error}");
    }
    assert!(ok(&["plan", text(&shapes), "--world", "2", "--apart"]).contains("predicted: "));
    // As any other flag of ranks asks `bench` for their steps.
    let timed = ok(&["bench", text(&shapes), "--rounds", "1", "--apart"]);
    assert!(timed.contains("2 ranks (thread)"), "{timed}");
}

#[test]
fn what_is_unknown_or_not_there_is_left_out_of_a_prediction() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = |more: &[&str]| ok(&[&["plan", text(&shapes)], more].concat());
    let printed = plan(&["--world", "2"]);
    assert!(printed.contains("buckets of ") && !printed.contains("ms this rank's"), "{printed}");
    assert!(plan(&["--world", "2", "--memory-gbs", "1"]).contains("ms this rank's update"));
    let printed = plan(&["--world", "1", "--accumulate", "2"]);
    assert!(!printed.contains("predicted: ") && !printed.contains("buckets of 0"), "{printed}");
}

#[test]
fn help_says_which_rules_have_a_setting_and_what_a_flag_changes() {
    let help = ok(&["train", "--help"]) + &ok(&["checkpoint", "reshard", "--help"]);
    let words: Vec<&str> = help.split_whitespace().collect();
    let help = words.join(" ");
    for told in [
        "schedule-free: β₁: the share of the average in the point where gradients are taken, in (0, 1)",
        "adamw, adam, schedule-free: ε, added to the root outside of it, at least 0;",
        "momentum: μ, the share of the velocity that remains after a step, in [0, 1); rmsprop: μ",
        "rmsprop: α: decay of the mean square, in [0, 1) [default: 0.99]",
        "whose own weight decay --exclude has taken away",
        "sums are in another order, so results differ by rounding",
        "256 at most [default: RAYON_NUM_THREADS",
        "`resumed_epochs` are those that the checkpoint had seen",
        "one of whole parameters is written beside them",
    ] {
        assert!(help.contains(told), "{told} is not in {help}");
    }
}

#[test]
#[cfg(unix)]
fn names_that_no_file_can_have_are_refused_before_any_work() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = Folder::new();
    let (params, grads) = folder.model();
    let files = folder.files();
    let (long, state) = (folder.path(&"x".repeat(256)), folder.path("state"));
    let report = ["train", "--epochs", "1", "--report", text(&long)];
    let output = crate::fusestep(&report);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("a file of this name"), "{error}");
    assert!(output.stdout.is_empty(), "trained before it was refused");
    let step = |out: &OsStr, state_out: &OsStr| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.args(["step", "--steps", "1000000000"]);
        command.args(["--params", text(&params), "--grads", text(&grads)]);
        command.arg("--out").arg(out);
        let output = command.arg("--state-out").arg(state_out).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let error = step(long.as_os_str(), state.as_os_str());
    assert!(error.contains("a file of this name"), "{error}");
    // The journal of both is named after the first, and the others stand in it.
    let nearly = folder.path(&"x".repeat(250));
    let error = step(nearly.as_os_str(), state.as_os_str());
    assert!(error.contains("use a shorter name"), "{error}");
    let bytes = folder.path(".").join(OsStr::from_bytes(b"state\xff"));
    let error = step(state.as_os_str(), bytes.as_os_str());
    assert!(error.contains("expected a path in UTF-8"), "{error}");
    assert_eq!(folder.files(), files);
}

#[test]
fn pages_take_the_place_of_no_model_no_other_page_and_no_checkpoint() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let (page, saved) = (folder.path("page"), folder.path("saved"));
    let content = fs::read(&shapes).unwrap();
    let lost = |args: &[&str], other: &str| {
        let error = refused(args);
        let named = format!("expected another file than {other}");
        assert!(error.contains(&named), "{args:?}: {error}");
    };
    let (model, page_text) = (text(&shapes), text(&page));
    for flag in ["--html", "--svg"] {
        lost(&["plan", model, flag, model], "the model");
    }
    lost(&["plan", model, "--html", page_text, "--svg", page_text], "--html");
    lost(&["bench", model, "--peers", "--svg", model], "the model");
    assert_eq!(fs::read(&shapes).unwrap(), content);
    let train = ["train", "--epochs", "1", "--checkpoint", text(&saved)];
    let report = saved.with_file_name("report.html");
    ok(&[&train[..], &["--report", text(&report)]].concat());
    let manifest = saved.join("manifest.json");
    let content = fs::read(&manifest).unwrap();
    let over = ["--resume", "--report", text(&manifest)];
    lost(&[&train[..], &over].concat(), "--checkpoint");
    assert_eq!(fs::read(&manifest).unwrap(), content);
    let new = folder.path("new");
    let clash = ["train", "--checkpoint", text(&new), "--report", text(&new)];
    lost(&clash, "--checkpoint");
    assert!(!new.exists());
}

#[test]
fn flags_of_a_step_are_refused_beside_a_collective() {
    let base = ["bench", "--collective", "all-reduce", "--sizes", "4KiB"];
    for flag in [
        ["--zero", "2"],
        ["--lr", "3"],
        ["--optimizer", "lion"],
        ["--excluded", "plain-lr"],
        ["--clip-norm", "1"],
        ["--svg", "times.svg"],
        ["--report", "times.html"],
        ["--python", "python3"],
        ["--peer", "candle"],
        ["--dtype", "f16"],
        ["--threads", "1"],
        ["--rounds", "1"],
    ] {
        let error = crate::refused(&[&base[..], &flag].concat());
        assert!(error.contains("--collective"), "{error}");
        assert!(error.contains(flag[0]), "{error}");
        let flags = error.split("Usage").next().unwrap_or_default().matches(" --").count();
        assert!(flags <= 1, "flags that nobody typed: {error}");
    }
}

#[test]
fn misspelt_flags_are_met_with_the_flag_and_with_no_advice_to_pass_them_as_values() {
    for (args, near) in [
        (&["plan", "a.json", "--exlude", "b"][..], "'--exclude'"),
        (&["train", "--clipnorm", "1"], "'--clip-norm'"),
        (&["launch", "-n", "2", "--patiense", "3", "--", "a"], "'--patience'"),
        (&["plan", "a.json", "--zzz"], "For more information, try '--help'"),
    ] {
        let error = refused(args);
        assert!(error.contains(near) && !error.contains("as a value"), "{args:?}: {error}");
    }
}

#[test]
fn what_is_no_file_is_told_so() {
    let folder = Folder::new();
    fs::create_dir_all(folder.path("manifest.json")).unwrap();
    let error = crate::refused(&["checkpoint", "verify", text(&folder.path(""))]);
    assert!(error.contains("can be read, found no ordinary file but a folder"), "{error}");
}

#[test]
fn numbers_that_f32_has_as_infinite_are_refused_and_f64_takes_them() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    for flag in ["--lr", "--weight-decay"] {
        let asked = ["plan", text(&shapes), flag, "1e300"];
        let error = crate::refused(&asked);
        assert!(error.contains("expected at most 3.4e38") && error.contains("1e300"), "{error}");
        ok(&[&asked[..], &["--dtype", "f64"]].concat());
    }
}
