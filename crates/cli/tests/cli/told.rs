//! What is told and where: quiet and verbose runs, output of ranks, completions and manual pages.

use std::fs;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fusestep");

/// The subcommands that the command's help lists.
fn subcommands() -> Vec<String> {
    let help = ok(&["-h"]);
    let listed = help.split("Commands:").nth(1).unwrap();
    let lines = listed.lines().skip(1).take_while(|line| line.starts_with("  "));
    let names: Vec<String> =
        lines.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect();
    assert!(names.len() > 7, "{help}");
    names
}

#[test]
fn completions_and_manual_pages_have_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let script = ok(&["completions", shell]);
        for name in subcommands() {
            assert!(script.contains(&name), "{shell} lacks {name}");
        }
        assert!(script.contains("clip-norm") && script.contains("fusestep"), "{shell}");
    }
    let page = ok(&["man"]);
    for name in subcommands() {
        assert!(page.contains(&format!("fusestep\\-{name}(1)")), "man lacks {name}: {page}");
        let own = ok(&["man", &name]);
        assert!(own.starts_with(".ie") && own.contains(".SH NAME"), "{own}");
    }
    assert!(ok(&["man", "train"]).contains("\\-\\-clip\\-norm"));
    let error = refused(&["man", "trian"]);
    assert!(error.contains("expected one of plan, step") && error.contains("`trian`"), "{error}");
}

#[test]
fn quiet_runs_print_the_result_alone_and_verbose_ones_more() {
    let folder = Folder::new();
    let report = folder.path("report.html");
    let train = ["train", "--epochs", "1", "--accumulate", "4", "--report", text(&report)];
    let run = |more: &[&str]| {
        let output = fusestep(&[&train[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        let all = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
        (all.0.unwrap(), all.1.unwrap())
    };
    let (usual, notes) = run(&[]);
    let (quiet, silence) = run(&["-q"]);
    assert!(usual.contains("plan adamw") && usual.contains("epoch 1: "), "{usual}");
    assert!(notes.contains("note: ") && notes.contains("wrote "), "{notes}");
    assert!(quiet.starts_with("1 epoch, 12 steps") && silence.is_empty(), "{quiet} {silence}");
    assert_eq!(quiet.lines().last(), usual.lines().last());
    let (_, more) = run(&["--verbose"]);
    assert!(more.contains("45 batches of 32 an epoch"), "{more}");
    let shapes = shapes(&folder);
    let plan = fusestep(&["-v", "plan", text(&shapes)]);
    assert!(String::from_utf8_lossy(&plan.stderr).contains("b: f32 [70000]"), "{plan:?}");
    let bench = fusestep(&["bench", "-v", text(&shapes), "--rounds", "2"]);
    assert!(String::from_utf8_lossy(&bench.stderr).contains("round 2: "), "{bench:?}");
    let scale = ["--dtype", "f16", "--loss-scale", "2^126"];
    let (_, warned) = run(&[&["-q"][..], &scale].concat());
    assert!(warned.starts_with("warning: every step was skipped"), "{warned}");
    let error = refused(&["-q", "train", "--epochs", "0"]);
    assert!(error.contains("expected a number from 1"), "{error}");
    assert!(refused(&["-q", "-v", "check"]).contains("cannot be used with"));
}

#[cfg(target_os = "linux")]
fn launched(args: &[&str]) -> (i32, String, String) {
    let output = fusestep(&[&["launch", "-n", "2"], args].concat());
    let [out, error] = [output.stdout, output.stderr].map(|all| String::from_utf8(all).unwrap());
    (output.status.code().unwrap(), out, error)
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_fails_is_named_with_its_code() {
    let (code, _, error) = launched(&["--", "false"]);
    assert!(code == 1 && error.contains("error: rank "), "{error}");
    let script = "test $RANK = 0 && sleep 60; exit 7";
    let (code, _, error) = launched(&["--", "sh", "-c", script]);
    assert!(code == 143 || code == 7, "{code}: {error}");
    assert!(error.contains("error: rank 0 ended") || error.contains("error: rank 1 ended"));
    let (code, _, error) = launched(&["--", "sh", "-c", "exit $((3 * RANK))"]);
    assert!(code == 3 && error.contains("error: rank 1 ended with exit code 3;"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn what_all_ranks_have_to_say_is_said_once() {
    let (code, _, error) = launched(&["--", PROGRAM, "train", "--epochs", "x"]);
    assert_eq!((code, error.matches("invalid value 'x'").count()), (2, 1), "{error}");
    let missing = ["--", PROGRAM, "plan", "/no/such/model"];
    let (_, _, error) = launched(&missing);
    assert_eq!(error.matches("were started together").count(), 1, "{error}");
    let script = format!("{PROGRAM} train --epochs 1 --engine processes --zero $RANK");
    let (_, _, error) = launched(&["--", "sh", "-c", &script]);
    assert!(error.contains(": --zero: expected 0 as on rank 0, found 1 on rank 1"), "{error}");
    // Errors of one rank are its own.
    let script = format!("{PROGRAM} train --epochs $RANK$RANK$RANK$RANK$RANK$RANK$RANK$RANK");
    let (_, _, error) = launched(&["--", "sh", "-c", &script]);
    assert!(error.contains("'00000000'") && error.contains("'11111111'"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn lines_of_ranks_go_where_they_are_asked_for() {
    let folder = Folder::new();
    let logs = folder.path("logs");
    let script = "echo one of $RANK; echo two >&2; printf end";
    let said = ["--", "sh", "-c", script];
    let (_, out, error) = launched(&[&["--prefix"][..], &said].concat());
    for rank in 0..2 {
        assert!(out.contains(&format!("[rank {rank}] one of {rank}\n")), "{out}");
        assert!(out.contains(&format!("[rank {rank}] end\n")), "{out}");
        assert!(error.contains(&format!("[rank {rank}] two\n")), "{error}");
    }
    let read = |rank: usize| fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
    let (_, out, error) = launched(&[&["--log-dir", text(&logs)][..], &said].concat());
    assert!(out.is_empty() && error.contains("rank-0.log to rank-1.log"), "{out} {error}");
    assert_eq!((read(0), read(1)), ("one of 0\ntwo\nend".into(), "one of 1\ntwo\nend".into()));
    let both = ["--prefix", "--log-dir", text(&logs)];
    let (_, out, _) = launched(&[&both[..], &said].concat());
    assert!(out.contains("[rank 1] one of 1\n") && read(1).contains("one of 1\n"), "{out}");
    let file = folder.path("file");
    fs::write(&file, "").unwrap();
    let error = refused(&["launch", "-n", "2", "--log-dir", text(&file), "--", "true"]);
    assert!(error.contains("--log-dir") && error.contains("expected a folder"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_that_have_not_met_are_told_of() {
    let alone = "the 2 ranks have not met by the engine `processes`";
    let (_, _, error) = launched(&["--", "true"]);
    assert!(error.contains(alone) && error.contains("--ranks 2"), "{error}");
    let train = ["--", PROGRAM, "train", "--epochs", "1", "--engine", "processes"];
    let (code, _, error) = launched(&train);
    assert!(code == 0 && !error.contains(alone), "{error}");
}
