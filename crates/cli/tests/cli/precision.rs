//! Parameters and state in 16 bits, for every rule.

use std::fs;
use std::path::Path;

use half::bf16;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;

use crate::{Folder, RULES, ok, refused, rule_names, text};

/// How bf16 parameters may be kept.
const KEPT: [&[&str]; 5] = [
    &[],
    &["--master-weights", "f32"],
    &["--master-weights", "remainder"],
    &["--state-dtype", "bf16"],
    &["--state-dtype", "bf16", "--rounding", "stochastic", "--rounding-seed", "3"],
];

/// Ways with state in int8, of rules that have codes.
const INT8: [&[&str]; 4] = [
    &["--state-dtype", "int8"],
    &["--state-dtype", "int8", "--master-weights", "f32"],
    &["--state-dtype", "int8", "--master-weights", "remainder"],
    &["--state-dtype", "int8", "--master-weights", "remainder8"],
];

/// Beginning of a refusal of an element type of state.
const OF_STATE: &str = "--state-dtype with --optimizer";

/// Shapes with a layer of more than 4,096 elements.
const SHAPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/shapes/resnet50.json");

/// Whether the state of a rule, as the command line has it, may be in int8.
fn has_codes(rule: &str) -> bool {
    let name = rule.split(' ').next().unwrap_or(rule);
    !["sgd", "lars", "lamb", "schedule-free"].contains(&name) && !rule.contains("--centered")
}

fn write_bf16(path: &Path, factor: f32) {
    let tensors: Vec<(&str, Vec<bf16>)> = [("b", 1), ("a", 17), ("empty", 0), ("c", 5001)]
        .map(|(name, numel)| {
            let value = |i: usize| (i * 7919 + 13) as f32 % 1999.0 * factor - 1000.0 * factor;
            (name, (0..numel).map(|i| bf16::from_f32(value(i))).collect())
        })
        .into();
    let views = tensors.iter().map(|(name, values)| {
        let view = TensorView::new(Dtype::BF16, vec![values.len()], bytemuck::cast_slice(values));
        (*name, view.unwrap())
    });
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

#[test]
fn a_step_in_16_bits_is_the_same_however_it_runs_and_goes_on_from_a_file() {
    let folder = Folder::new();
    let [params, grads, whole, other, state] =
        ["params", "grads", "whole", "other", "state"].map(|name| folder.path(name));
    write_bf16(&params, 1e-4);
    write_bf16(&grads, -1e-3);
    for rule in RULES {
        let kept = KEPT.iter().chain(INT8.iter().filter(|_| has_codes(rule)));
        let has_state = !rule.starts_with("sgd");
        let kept = kept.filter(|kept| has_state || !kept.contains(&"--state-dtype"));
        for &kept in kept {
            let run = |params: &Path, out: &Path, more: &[&str]| {
                let mut args = vec!["step", "--params", text(params), "--grads", text(&grads)];
                args.extend(["--lr", "1e-1", "--out", text(out), "--optimizer"]);
                args.extend(rule.split(' ').chain(kept.iter().copied()));
                args.extend(more);
                ok(&args);
                fs::read(out).unwrap()
            };
            let expected = run(&params, &whole, &["--steps", "3"]);
            assert!(expected != fs::read(&params).unwrap(), "{rule} {kept:?}");
            for more in [&["--naive"][..], &["--threads", "3", "--argument-bytes", "300"]] {
                let more = [&["--steps", "3"], more].concat();
                assert!(run(&params, &other, &more) == expected, "{rule} {kept:?} {more:?}");
            }
            run(&params, &other, &["--steps", "1", "--state-out", text(&state)]);
            let first = folder.path("first");
            fs::copy(&other, &first).unwrap();
            let rest = run(&first, &other, &["--steps", "2", "--state", text(&state)]);
            assert!(rest == expected, "{rule} {kept:?}: through a file");
        }
    }
}

#[test]
fn plans_and_timings_know_every_rule_in_16_bits() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[100, 10]}]"#).unwrap();
    for rule in rule_names() {
        for dtype in ["bf16", "f16"] {
            let model = ["--optimizer", rule, "--dtype", dtype, "--master-weights", "f32"];
            let plan = ok(&[&["plan", text(&shapes)], &model[..]].concat());
            assert!(plan.contains(&format!("param {dtype}, grad {dtype}")), "{plan}");
            assert!(plan.contains("master f32"), "{plan}");
            let bench = ["bench", text(&shapes), "--rounds", "1", "--json"];
            let bench = ok(&[&bench[..], &model[..]].concat());
            let bench: Value = serde_json::from_str(&bench).unwrap();
            assert_eq!(bench["dtype"], dtype);
            assert!(bench["times_f32_step"].as_f64().unwrap() > 0.0, "{bench}");
        }
        let args = ["plan", text(&shapes), "--optimizer", rule, "--dtype", "f16"];
        let error = refused(&[&args[..], &["--state-dtype", "bf16"]].concat());
        let said = match rule {
            "sgd" => "found sgd, which keeps none".to_owned(),
            rule => format!("{OF_STATE} {rule} and parameters of f16 such as `a`"),
        };
        assert!(error.contains(&said), "{error}");
    }
}

#[test]
fn int8_is_refused_by_name_where_there_are_no_codes() {
    for (flags, expected) in [
        (&["--optimizer", "schedule-free"][..], "schedule-free and parameters of f32 such as"),
        (&["--optimizer", "sgd"], "expected a rule that keeps state, found sgd"),
        (
            &["--dtype", "f16"],
            "expected f32, found int8; give one of these, or leave --state-dtype",
        ),
        (&["--rounding", "stochastic"], "--rounding and --state-dtype: codes are dithered"),
        (&["--master-weights", "remainder8"], "--master-weights with --optimizer adamw and"),
        (&["--keep-f32", "nothing"], "--keep-f32: expected a part of a parameter's name"),
        (
            &["--keep-f32", "bias"],
            "found `bias`, which is in names of smaller ones alone: `layer0.",
        ),
        (&["--keep-f32", "bias"], "state below 4,096 stays in f32 anyway; leave it out"),
    ] {
        let error =
            refused(&[&["train", "--epochs", "1", "--state-dtype", "int8"], flags].concat());
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
    let bf16 = ["train", "--epochs", "1", "--dtype", "bf16", "--master-weights", "remainder8"];
    let error = refused(&bf16);
    assert!(error.contains("remainder, unless state is in int8, found remainder8"), "{error}");
    // However f32 comes about, the flag names the one value that works.
    for (state, found) in [(&[][..], "f32"), (&["--state-dtype", "bf16"], "bf16")] {
        for command in [&["train", "--epochs", "1"][..], &["plan", SHAPES]] {
            let error = refused(&[command, &["--keep-f32", "layer"], state].concat());
            let said =
                format!("--keep-f32: expected --state-dtype int8 too, found {found}; it has");
            assert!(error.contains(&said), "{error}");
        }
    }
}

#[test]
fn refusals_of_int8_name_flags_on_ranks_that_are_threads_too() {
    for ranks in ["1", "2"] {
        let rule = "schedule-free";
        let train = ["train", "--ranks", ranks, "--optimizer", rule, "--state-dtype", "int8"];
        let error = refused(&train);
        assert!(error.contains("--state-dtype with --optimizer schedule-free and"), "{error}");
        assert!(error.contains("or leave --state-dtype out"), "{error}");
    }
}

#[test]
fn plans_say_how_values_beside_codes_are_rounded() {
    let plan = |more: &[&str]| ok(&[&["plan", SHAPES, "--optimizer", "adamw"], more].concat());
    let told = "state int8, second moments and maxima dithered, all else rounded to nearest";
    assert!(plan(&["--state-dtype", "int8"]).contains(told));
    assert!(!plan(&["--state-dtype", "bf16"]).contains("dithered"));
}

#[test]
fn training_says_how_many_steps_were_skipped() {
    let scale = ["--dtype", "f16", "--loss-scale", "8.507059173023462e37"];
    let run = |more: &[&str]| ok(&[&["train", "--epochs", "1"], more].concat());
    let folder = Folder::new();
    let page = folder.path("page.html");
    let printed = run(&[&scale[..], &["--report", text(&page)]].concat());
    assert!(printed.contains("45 steps skipped, since a gradient"), "{printed}");
    assert!(fs::read_to_string(&page).unwrap().contains("steps skipped"));
    let json: Value = serde_json::from_str(&run(&[&scale[..], &["--json"]].concat())).unwrap();
    assert_eq!(json["skipped_steps"], 45);
    assert!(!run(&[]).contains("skipped"));
}
