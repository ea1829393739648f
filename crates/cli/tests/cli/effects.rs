//! Flags that would do nothing are refused, and say what would work.

use std::fs;

use serde_json::Value;

use crate::messages::shapes;
use crate::{Folder, ok, refused, text};

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
