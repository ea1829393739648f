//! Flags that would do nothing are refused, and say what would work.

use std::fs;

use serde_json::Value;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

/// Requires that a command is refused with these words, and taken with `more`.
fn refuses(command: &[&str], said: &[&str], more: &[&str]) {
    let error = refused(command);
    for said in said {
        assert!(error.contains(said), "{command:?}: {error}\nlacks {said}");
    }
    ok(&[command, more].concat());
}

#[test]
fn flags_of_ranks_ask_for_ranks() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = ["plan", text(&shapes)];
    let train = ["train", "--epochs", "1"];
    for flags in [
        &["--zero", "2"][..],
        &["--bucket-cap-mib", "1"],
        &["--comm-streams", "1"],
        &["--accumulate", "2", "--reduced", "per-micro-step"],
        &["--local-sgd", "2"],
    ] {
        let named = flags.iter().rfind(|flag| flag.starts_with("--")).unwrap();
        for (base, several, of) in
            [(&plan[..], ["--world", "2"], "--world"), (&train, ["--ranks", "2"], "--ranks")]
        {
            let said = format!("{named}: expected {of}");
            refuses(&[base, flags].concat(), &[&said, "no effect on one rank"], &several);
        }
    }
    for command in [&plan[..], &train] {
        let error = refused(&[command, &["--zero", "1", "--shard-group", "2"]].concat());
        assert!(error.contains("--zero: expected --"), "{error}");
        // Sums over micro-steps and updates in backward are for one rank, too.
        ok(&[command, &["--accumulate", "2"]].concat());
        ok(&[command, &["--update-in-backward", "--bucket-cap-mib", "0.01"]].concat());
    }
}

#[test]
fn a_trust_ratio_is_asked_of_a_rule_that_has_one() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let named = ["--trust-of", "a=plain"];
    for command in [&["plan", text(&shapes)][..], &["bench", text(&shapes), "--rounds", "1"]] {
        let command = [command, &named].concat();
        let said = "--trust-of of `a`: expected parameters of a rule that scales by trust ratios";
        refuses(&command, &[said, "found adamw, which has none"], &["--optimizer", "lars"]);
    }
}

#[test]
fn flags_of_several_ranks_are_refused_on_one() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let bench = ["bench", text(&shapes)];
    let collective = ["bench", "--collective", "all-reduce"];
    let check = ["check", "--engine", "thread"];
    for command in [&["train"][..], &bench, &collective, &check] {
        let error = refused(&[command, &["--ranks", "1", "--timeout", "5"]].concat());
        let said = "--timeout: expected --ranks of 2 or more, found 1; one rank waits for nobody";
        assert!(error.contains(said), "{command:?}: {error}");
        let error = refused(&[command, &["--ranks", "1", "--flight-recorder", "f"]].concat());
        let said = "--flight-recorder: expected --ranks of 2 or more, found 1; one rank makes no";
        assert!(error.contains(said), "{command:?}: {error}");
    }
    let error = refused(&["train", "--ranks", "1", "--compare-parameters", "5"]);
    let said = "--compare-parameters: expected --ranks of 2 or more, found 1";
    assert!(error.contains(said), "{error}");
    // An engine alone is no number of ranks.
    for engine in ["thread", "processes"] {
        let train = ["train", "--epochs", "1", "--engine", engine];
        for flags in [
            &["--zero", "2"][..],
            &["--bucket-cap-mib", "1"],
            &["--comm-streams", "1"],
            &["--local-sgd", "2"],
            &["--separate"],
            &["--compare-parameters", "5"],
            &["--timeout", "5"],
            &["--flight-recorder", "recorder"],
        ] {
            let error = refused(&[&train[..], flags].concat());
            let said = "expected --ranks too, found no such flag; ";
            assert!(error.contains(said) && error.contains("one rank"), "{flags:?}: {error}");
            assert!(error.contains(flags[0]), "{flags:?}: {error}");
        }
        let error = refused(&train);
        assert!(error.contains("--engine: expected --ranks too, found no such flag"), "{error}");
        ok(&[&train[..], &["--ranks", "2", "--timeout", "60"]].concat());
    }
}

#[test]
fn every_rank_has_a_sample() {
    let error = refused(&["train", "--ranks", "4", "--batch", "3"]);
    assert!(error.contains("--batch") && error.contains("4 ranks") && error.contains("found 3"));
    ok(&["train", "--ranks", "3", "--batch", "3", "--epochs", "1"]);
}

#[test]
fn flags_that_others_leave_without_effect_are_refused() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = ["plan", text(&shapes)];
    let ranks = ["plan", text(&shapes), "--world", "2"];
    for (base, flags, said) in [
        (&ranks[..], &["--apart", "--naive"][..], "--separate and --naive: the second"),
        (&ranks, &["--apart", "--comm-streams", "2"], "--separate and --comm-streams: w"),
        (&ranks, &["--bucket-cap-mib", "1", "--naive"], "--bucket-cap-mib and --naive: the s"),
        (
            &plan,
            &["--rounding-seed", "3"],
            "--rounding-seed: expected --rounding stochastic too, found nearest",
        ),
        (&plan, &["--optimizer", "lars", "--excluded", "trust-ratio"], "--excluded: expected"),
        (&plan, &["--optimizer", "sgd", "--exclude", "a"], "--exclude `a`: expected a --weight-d"),
        (&plan, &["--weight-decay", "0", "--exclude", "a"], "--exclude `a`: expected a --weight-d"),
        (&plan, &["--optimizer", "sgd", "--decay", "decoupled"], "--decay: expected a --weight-d"),
    ] {
        let error = refused(&[base, flags].concat());
        assert!(error.contains(said), "{flags:?}: {error}");
    }
    ok(&[&plan[..], &["--optimizer", "lars", "--exclude", "a", "--weight-decay", "0"]].concat());
}

#[test]
fn a_dtype_is_for_tensors_that_state_none() {
    let folder = Folder::new();
    let (model, _) = folder.model();
    let path = folder.path("own.json");
    fs::write(&path, r#"[{"name":"w","shape":[2],"dtype":"f16"}]"#).unwrap();
    for model in [&model, &path] {
        for command in ["plan", "bench"] {
            let error = refused(&[command, text(model), "--dtype", "bf16"]);
            assert!(
                error.contains("--dtype: expected shapes without a dtype of their own"),
                "{error}"
            );
        }
    }
    fs::write(&path, r#"[{"name":"w","shape":[2],"dtype":"f16"},{"name":"v","shape":[2]}]"#)
        .unwrap();
    let plan = ok(&["plan", text(&path), "--dtype", "bf16"]);
    assert!(plan.contains("bf16") && plan.contains("f16"), "{plan}");
}

#[test]
fn what_peers_do_not_know_is_refused_beside_them() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    for flags in [
        &["--exclude", "a"][..],
        &["--schedule", "warmup:3"],
        &["--update-norms"],
        &["--state-dtype", "bf16"],
    ] {
        for peer in [&["--peer", "candle"][..], &["--peers"]] {
            let error = refused(&[&["bench", text(&shapes)], flags, peer].concat());
            assert!(error.contains("expected a plain step") && error.contains(flags[0]), "{error}");
        }
    }
}

#[test]
fn state_in_int8_is_timed_beside_peers_that_have_state_of_8_bits() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"{"a":[4100],"b":[3]}"#).unwrap();
    let bench = ["bench", text(&shapes), "--state-dtype", "int8", "--rounds", "1"];
    let error = refused(&[&bench[..], &["--peer", "candle"]].concat());
    assert!(error.contains("expected a plain step, found --state-dtype"), "{error}");
    let more = ["--peers", "--keep-f32", "a"];
    let error = refused(&[&bench[..], &more].concat());
    assert!(error.contains("expected a plain step, found --keep-f32"), "{error}");
    // Those that this Python has not are named with the way to add them.
    let json = ok(&[&bench[..], &["--peers", "--json"]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["state_dtype"], "int8");
    let all = ["peers", "absent"].into_iter().flat_map(|key| json[key].as_array().unwrap());
    let mut names: Vec<_> = all.map(|peer| peer["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    let expected = ["AdamW, fused, state in f32", "AdamW8bit", "Adam8bit", "AdamW8bit"];
    let packages = ["PyTorch", "bitsandbytes", "bitsandbytes", "torchao"];
    let mut expected: Vec<_> =
        packages.iter().zip(expected).map(|(a, b)| [*a, b].join(" ")).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    let none = ["--peers", "--python", "/no/python"];
    let told = ok(&[&bench[..], &none].concat());
    let absent = "bitsandbytes, torchao and PyTorch (/no/python) not timed";
    assert!(told.contains(absent) && told.contains("of f32, state in int8;"), "{told}");
}

#[test]
fn tensors_without_elements_are_no_step_of_candle_s() {
    let folder = Folder::new();
    let path = folder.path("empty.json");
    fs::write(&path, r#"{"empty":[0,3],"w":[3]}"#).unwrap();
    let timed = ok(&["bench", text(&path), "--rounds", "1", "--peer", "candle"]);
    assert!(timed.contains("candle's AdamW"), "{timed}");
}

#[test]
fn an_average_is_asked_of_a_rule_that_keeps_one() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [out, average] = ["out", "average"].map(|name| folder.path(name));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let step = [&step[..], &["--average-out", text(&average)]].concat();
    let said = "--average-out: expected --optimizer schedule-free, found adamw, which keeps no";
    refuses(&step, &[said], &["--optimizer", "schedule-free"]);
}

#[test]
fn a_type_of_state_is_asked_of_a_rule_that_keeps_some() {
    let train = ["train", "--epochs", "1", "--optimizer"];
    for (rule, flags, said) in [
        ("sgd", &["--state-dtype", "bf16"][..], "found sgd, which keeps none"),
        ("sgd", &["--state-dtype", "int8"], "found sgd, which keeps none"),
        ("sgd", &["--state-dtype", "int8", "--keep-f32", "1"], "found sgd, which keeps"),
        (
            "sgd",
            &["--state-dtype", "bf16", "--rounding", "stochastic"],
            "--state-dtype: expected a rule that keeps state",
        ),
        (
            "momentum",
            &["--momentum", "0", "--state-dtype", "int8"],
            "found sgd, which keeps none; leave it out",
        ),
        (
            "rmsprop",
            &["--centered", "--state-dtype", "int8"],
            "--state-dtype int8 and --centered: the second keeps means that codes of 8 bits do not",
        ),
    ] {
        let error = refused(&[&train[..], &[rule], flags].concat());
        assert!(error.contains(said), "{rule} {flags:?}: {error}");
    }
    ok(&[&train[..], &["momentum", "--state-dtype", "int8"]].concat());
    ok(&[&train[..], &["rmsprop", "--centered", "--state-dtype", "bf16"]].concat());
}

#[test]
fn a_rate_of_what_is_excluded_needs_a_decay_to_take_away() {
    let train = ["train", "--epochs", "1", "--optimizer", "lars", "--exclude", "bias"];
    let ratio = [&train[..], &["--excluded", "trust-ratio", "--weight-decay", "0"]].concat();
    let error = refused(&ratio);
    let said = "--excluded trust-ratio: expected plain-lr, or a --weight-decay above 0, found 0";
    assert!(error.contains(said), "{error}");
    ok(&[&train[..], &["--excluded", "plain-lr", "--weight-decay", "0"]].concat());
}

#[test]
fn how_gradients_are_reduced_is_nothing_to_ranks_that_average_parameters() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let (plan, train) = (["plan", text(&shapes), "--world", "2"], ["train", "--epochs", "1"]);
    let train = [&train[..], &["--ranks", "2"]].concat();
    for command in [&plan[..], &train] {
        let command = [command, &["--local-sgd", "4"]].concat();
        for flags in [
            &["--bucket-cap-mib", "0.01"][..],
            &["--comm-streams", "1"],
            &["--separate"],
            &["--reduced", "per-micro-step", "--accumulate", "2"],
            &["--reduce-dtype", "bf16"],
        ] {
            let error = refused(&[&command[..], flags].concat());
            let said = format!("--local-sgd and {}: ranks average parameters and send", flags[0]);
            assert!(error.contains(&said), "{error}");
        }
        ok(&[&command[..], &["--update-in-backward", "--bucket-cap-mib", "0.01"]].concat());
    }
}

#[test]
fn averages_of_one_rank_are_not_planned() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    for (command, flag) in
        [(&["train", "--epochs", "1"][..], "--ranks"), (&["plan", text(&shapes)], "--world")]
    {
        let found = ok(&[command, &[flag, "1", "--local-sgd", "8"]].concat());
        assert!(!found.contains("average"), "{found}");
        let groups = ["--zero", "1", "--shard-group", "2"];
        ok(&[command, &[flag, "1"], &groups].concat());
        ok(&[command, &[flag, "1", "--separate"]].concat());
    }
    // Ranks that have averaged may go on as one.
    let [run, one] = ["run", "one"].map(|name| folder.path(name));
    let train = ["train", "--local-sgd", "4", "--ranks"];
    ok(&[&train[..], &["2", "--epochs", "1", "--checkpoint", text(&run)]].concat());
    let reshard = ["checkpoint", "reshard", text(&run), "--average", "--world", "1", "--out"];
    ok(&[&reshard[..], &[text(&one)]].concat());
    ok(&[&train[..], &["1", "--epochs", "2", "--checkpoint", text(&one), "--resume"]].concat());
}

#[test]
fn what_is_refused_on_one_rank_has_no_note() {
    for flags in [
        &["--owners", "tensors"][..],
        &["--reduced", "per-micro-step"],
        &["--shard-group", "1"],
        &["--local-sgd-begin", "3"],
    ] {
        let error = refused(&[&["train", "--epochs", "1", "--ranks", "1"], flags].concat());
        assert!(error.contains("it has no effect otherwise"), "{error}");
        assert!(!error.contains("no effect on one rank"), "{error}");
    }
}

#[test]
fn comparisons_that_a_run_never_comes_to_are_refused_or_told() {
    let train = ["train", "--epochs", "1", "--ranks", "2", "--compare-parameters"];
    let error = refused(&[&train[..], &["46"]].concat());
    let said = "--compare-parameters: expected at most the 45 batches of this run, found 46";
    assert!(error.contains(said), "{error}");
    ok(&[&train[..], &["45"]].concat());
    for (averages, every, said) in [
        ("4", "8", None),
        ("4", "2", Some("were compared 11 times, and 11 comparisons between averages left out")),
        ("44", "5", Some("were compared 0 times, and 9 comparisons between averages left out")),
    ] {
        let output = fusestep(&[&train[..], &[every, "--local-sgd", averages]].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        let note = "only batches that end in an average are compared";
        assert_eq!(error.matches(note).count(), 1, "{error}");
        assert_eq!(error.matches("left out").count(), usize::from(said.is_some()), "{error}");
        assert!(said.is_none_or(|said| error.contains(said)), "{error}");
    }
}

#[test]
fn caps_of_too_many_buckets_are_refused_with_one_that_works() {
    let train = ["train", "--epochs", "1", "--ranks", "2", "--bucket-cap-mib"];
    let error = refused(&[&train[..], &["1e-9"]].concat());
    let said = "--bucket-cap-mib: expected at most 16,384 buckets of this model's gradients, found";
    assert!(error.contains(said) && error.contains("some 17,226; give 0.0000077 or"), "{error}");
}
