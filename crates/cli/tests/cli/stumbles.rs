//! Places where new users stumble: each is told what happened, and what works.

use std::fs;
use std::process::Command;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

/// What a run that succeeds prints on standard error.
fn told(args: &[&str]) -> String {
    let output = fusestep(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {error}");
    error
}

#[test]
fn patterns_that_both_match_say_which_counts() {
    let base = ["train", "--epochs", "1", "--exclude", "bias", "--weight-decay", "0.1"];
    let both = ["--weight-decay-of", "layer0=0.2"];
    let note = "note: --weight-decay-of `layer0=0.2` counts for `layer0.bias`, and --exclude `bias` \
                does not";
    let found = told(&[&base[..], &both].concat());
    assert!(found.contains(note), "{found}");
    assert!(!told(&base).contains("counts for"));
    // Equal values leave nothing to say.
    let same = ["--lr-scale", "bias=2", "--lr-scale", "layer0=2"];
    assert!(!told(&[&["train", "--epochs", "1"][..], &same].concat()).contains("counts for"));
}

#[test]
fn switches_of_rules_say_what_they_turn_on() {
    for (rule, flag, says) in [
        ("adamw", "--amsgrad", "the running one, or with AMSGrad its largest value so far"),
        ("rmsprop", "--centered", "the root of its mean square or, centered, of its variance"),
        ("momentum", "--nesterov", "the velocity's or, with Nesterov's momentum, the one a step"),
    ] {
        let help = ok(&["train", "--optimizer", rule, "--help"]);
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let behind = words.split(flag).nth(1).unwrap();
        let before_next = behind.split(" --").next().unwrap();
        assert!(before_next.contains(says), "{behind}");
    }
}

#[test]
fn runs_go_on_with_the_samples_of_their_updates() {
    let folder = Folder::new();
    let run = folder.path("run");
    let train = ["train", "--checkpoint", text(&run), "--batch", "16", "--epochs"];
    for lanes in [&[][..], &["--lanes", "2"]] {
        ok(&[&train[..], &["1", "--accumulate", "2"], lanes].concat());
        let resumed =
            |count| [&train[..], &["2", "--resume", "--accumulate", count], lanes].concat();
        let output = fusestep(&resumed("4"));
        let error = String::from_utf8(output.stderr).unwrap();
        let said = "--accumulate: expected 4, found 2 in the checkpoint; give --accumulate 2 to go";
        assert!(!output.status.success() && error.contains(said), "{error}");
        assert!(output.stdout.is_empty(), "a plan before the reason: {:?}", output.stdout);
        ok(&resumed("2"));
        fs::remove_dir_all(&run).unwrap();
    }
}

#[test]
fn a_shorter_last_window_of_micro_steps_is_told_once() {
    let found = told(&["train", "--epochs", "2", "--accumulate", "4"]);
    let note = "the last update of each epoch has 1 micro-step, not 4: an epoch has 45 batches";
    assert_eq!(found.matches(note).count(), 1, "{found}");
    assert!(!told(&["train", "--epochs", "1", "--accumulate", "5"]).contains("last update"));
}

#[test]
fn numbers_have_one_form_and_words_are_said_in_full() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let timed = ok(&["bench", text(&shapes), "--rounds", "1"]);
    assert!(timed.contains("70,004 elements of f32"), "{timed}");
    assert!(timed.contains("share of the memory bandwidth: "), "{timed}");
    let ranks = ok(&["bench", text(&shapes), "--rounds", "1", "--ranks", "2"]);
    assert!(ranks.contains("share of the memory bandwidth: "), "{ranks}");
    let plan = |more: &[&str]| ok(&[&["plan", text(&shapes)], more].concat());
    let bf16 = plan(&["--dtype", "bf16", "--master-weights", "remainder"]);
    assert!(bf16.contains("master weights remainder, state f32, rounded"), "{bf16}");
    let local = plan(&["--world", "2", "--local-sgd", "4"]);
    assert!(local.contains("every 4 steps; gradients"), "{local}");
    let begun = plan(&["--world", "2", "--local-sgd", "4", "--local-sgd-begin", "3"]);
    assert!(begun.contains("every 4 steps, and after each of the first 3 steps"), "{begun}");
    let size = ["bench", "--collective", "all-reduce", "--sizes", "1MiB"];
    assert!(ok(&size).contains("1,048,576 B"));
}

#[test]
fn flags_of_a_wait_are_blamed_one_by_one() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    for command in [&["train"][..], &["bench", text(&shapes)], &["check"]] {
        for (flag, other) in [("--timeout", "--flight"), ("--flight-recorder", "--timeout")] {
            let error = refused(&[command, &[flag, "3"]].concat());
            assert!(error.contains(&format!("{flag}: expected")), "{error}");
            assert!(!error.contains(other), "{error}");
        }
    }
    let error = refused(&["bench", text(&shapes), "--timeout", "3", "--flight-recorder", "f"]);
    assert!(error.contains("--timeout and --flight-recorder: expected"), "{error}");
}

#[test]
fn shapes_that_are_cut_off_are_told_by_their_line() {
    let folder = Folder::new();
    let path = folder.path("cut.json");
    for (content, line) in
        [("[{\"name\": \"a\",\n \"shape\": [3", 2), ("{\"a\": [3, 4],\n\n \"b\": [3", 3), ("", 1)]
    {
        fs::write(&path, content).unwrap();
        let error = refused(&["plan", text(&path)]);
        let said = [&format!("cut.json:{line}: expected [{{"), "found the end of the file"];
        assert!(said.iter().all(|said| error.contains(*said)), "{content:?}: {error}");
    }
    fs::write(&path, "{\"a\": [3, 4],\n \"b\" [3]}").unwrap();
    let error = refused(&["plan", text(&path)]);
    assert!(error.contains("cut.json:2: expected [{") && !error.contains("end of"), "{error}");
}

#[test]
fn places_that_are_not_there_are_told_after_their_flag() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let nowhere = folder.path("no/out");
    let within = params.join("out");
    let files = ["step", "--params", text(&params), "--grads", text(&grads)];
    for (out, found) in [(&nowhere, "found no such folder at"), (&within, "found a file at")] {
        let error = refused(&[&files[..], &["--out", text(out)]].concat());
        assert!(error.contains("error: --out ") && error.contains(found), "{error}");
        assert!(error.contains("make the folder, or give another path"), "{error}");
        for flag in ["--html", "--svg"] {
            let error = refused(&["plan", text(&params), flag, text(out)]);
            assert!(error.contains(&format!("{flag} ")) && error.contains(found), "{error}");
        }
        let error = refused(&["train", "--epochs", "1", "--report", text(out)]);
        assert!(error.contains("--report ") && error.contains(found), "{error}");
    }
}

#[test]
fn checkpoints_show_numbers_tell_of_damage_and_of_values_that_are_not_finite() {
    let folder = Folder::new();
    let saved = folder.path("run");
    let train = ["train", "--checkpoint", text(&saved), "--batch", "1437"];
    let far = ["--optimizer", "sgd", "--lr", "3e38", "--rescale", "1e10", "--epochs"];
    ok(&[&train[..], &far, &["1"]].concat());
    let inspected = ok(&["checkpoint", "inspect", text(&saved)]);
    assert!(inspected.contains("loss_sum = 0\n"), "{inspected}");
    assert!(inspected.contains("last_loss = 2.") && !inspected.contains("bits"), "{inspected}");
    let with_bits = ok(&["checkpoint", "inspect", text(&saved), "--bits"]);
    assert!(with_bits.contains("loss_sum = 0 (bits 0000000000000000)"), "{with_bits}");
    let loss = with_bits.lines().find(|line| line.starts_with("last_loss = 2.")).unwrap();
    assert!(loss.contains(" (bits 4"), "{loss}");
    let not_finite = "@param` and";
    for command in ["inspect", "verify"] {
        let output = fusestep(&["checkpoint", command, text(&saved)]);
        let all = [output.stdout, output.stderr].concat();
        let all = String::from_utf8(all).unwrap();
        assert!(all.contains(not_finite) && all.contains("not finite"), "{command}: {all}");
    }
    let error = refused(&[&train[..], &far, &["2", "--resume"]].concat());
    let said = ["not finite, and the run that goes on", "give an earlier --checkpoint"];
    assert!(said.iter().all(|said| error.contains(said)), "{error}");
    let error = refused(&[&train[..], &far, &["2", "--resume", "--seed", "7"]].concat());
    assert!(error.contains("--seed: expected 7, found 1") && error.contains("give --seed 1"));
    let shard = saved.join("step-00000001-a/model.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let error = refused(&["checkpoint", "verify", text(&saved)]);
    assert!(error.contains("expected checksum") && error.contains("put back a copy"), "{error}");
    assert!(told(&["checkpoint", "inspect", text(&saved)]).contains("expected checksum"));
}

#[test]
fn shard_groups_that_do_not_divide_the_ranks_are_told_which_do() {
    let error = refused(&["train", "--ranks", "4", "--zero", "1", "--shard-group", "3"]);
    let said = ["--shard-group: expected", "found 4 ranks; groups of 1, 2 or 4 work"];
    assert!(said.iter().all(|said| error.contains(said)), "{error}");
}

#[test]
fn a_launcher_s_variable_that_is_left_over_is_told_with_its_cure() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
    let output = command.args(["train", "--epochs", "1"]).env("WORLD_SIZE", "2").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(error.contains("(WORLD_SIZE=2)"), "{error}");
    assert!(error.contains("if no launcher runs, `unset WORLD_SIZE`"), "{error}");
}
