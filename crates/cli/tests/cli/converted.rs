//! `checkpoint convert`: runs that go on with their state in another type.

use std::path::Path;

use serde_json::Value;

use crate::{Folder, ok, refused, text};

/// The hash of the parameters of a run with these flags.
fn hash(flags: &str, folder: &Path, resume: &[&str]) -> Value {
    let words: Vec<&str> = flags.split_whitespace().collect();
    let json = ok(&[&words[..], &["--json", "--checkpoint", text(folder)], resume].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    json["params_hash"].clone()
}

fn convert(from: &Path, to: &Path, flags: &[&str]) -> String {
    let all = ["checkpoint", "convert", text(from), "--out", text(to)];
    let told = ok(&[&all[..], flags].concat());
    assert!(told.starts_with(&format!("wrote {}: ", to.display())), "{told}");
    ok(&["checkpoint", "inspect", text(to)])
}

#[test]
fn a_run_goes_on_in_int8_and_in_f32_again() {
    let folder = Folder::new();
    let [wide, coded, back] = ["wide", "coded", "back"].map(|name| folder.path(name));
    hash("train --epochs 1 --ranks 2 --zero 1", &wide, &[]);
    let told = convert(&wide, &coded, &["--state-dtype", "int8", "--keep-f32", "layer1"]);
    assert!(told.contains("layer0.weight@moment1: u8") && told.contains("moment1_units"), "{told}");
    assert!(told.contains("layer1.weight@moment1: f32"), "{told}");
    let other = ["train", "--epochs", "2", "--resume", "--checkpoint", text(&coded)];
    let error = refused(&other);
    let cure = "state in int8; go on with that, or convert it by `fusestep checkpoint convert \
                --state-dtype f32`";
    assert!(error.contains("expected state in f32") && error.contains(cure), "{error}");
    // Its own files say how it keeps its state, so that no other run takes it.
    let other = ["train", "--resume", "--state-dtype", "int8", "--checkpoint", text(&coded)];
    let error = refused(&other);
    assert!(error.contains("layer1.weight@moment1`: expected state in int8"), "{error}");
    let int8 = "train --epochs 2 --resume --state-dtype int8 --keep-f32 layer1";
    let whole = hash(int8, &coded, &["--ranks", "3", "--zero", "2"]);
    assert!(whole.is_string());
    convert(&coded, &back, &["--state-dtype", "f32"]);
    hash("train --epochs 3 --resume --ranks 2", &back, &[]);
    let twice = folder.path("twice");
    let told = convert(&back, &twice, &["--state-dtype", "bf16"]);
    assert!(told.contains("layer0.weight@moment2: bf16"), "{told}");
    hash("train --epochs 4 --resume --state-dtype bf16", &twice, &[]);
}

#[test]
fn eight_bits_of_remainder_become_sixteen_with_the_same_values() {
    let folder = Folder::new();
    let [coded, wide] = ["coded", "wide"].map(|name| folder.path(name));
    let bf16 = "train --dtype bf16 --state-dtype int8 --master-weights remainder8 --epochs";
    hash(&format!("{bf16} 1"), &coded, &[]);
    let told = convert(&coded, &wide, &["--state-dtype", "f32"]);
    assert!(told.contains("layer0.weight@remainder: u16"), "{told}");
    let bf16 = "train --dtype bf16 --master-weights remainder --resume --epochs 2";
    assert!(hash(bf16, &wide, &[]).is_string());
}

#[test]
fn state_that_was_rounded_at_random_is_not_where_nothing_is_rounded() {
    let folder = Folder::new();
    let [narrow, wide, coded] = ["narrow", "wide", "coded"].map(|name| folder.path(name));
    hash("train --epochs 1 --state-dtype bf16 --rounding stochastic", &narrow, &[]);
    convert(&narrow, &wide, &["--state-dtype", "f32"]);
    hash("train --epochs 2 --resume", &wide, &[]);
    convert(&narrow, &coded, &["--state-dtype", "int8"]);
    hash("train --epochs 2 --resume --state-dtype int8", &coded, &[]);
}

#[test]
fn what_cannot_be_converted_is_refused_by_name() {
    let folder = Folder::new();
    let [from, to] = ["from", "to"].map(|name| folder.path(name));
    hash("train --epochs 1", &from, &[]);
    let refused = |flags: &[&str]| {
        let all = ["checkpoint", "convert", text(&from), "--out", text(&to)];
        let error = refused(&[&all[..], flags].concat());
        assert!(!to.exists(), "{error}");
        error
    };
    let error = refused(&["--state-dtype", "f32", "--keep-f32", "layer0"]);
    assert!(error.contains("--keep-f32 without --state-dtype int8"), "{error}");
    let error = refused(&["--state-dtype", "int8", "--keep-f32", "layer9"]);
    assert!(error.contains("--keep-f32 layer9: expected a part of the name"), "{error}");
    let error = refused(&["--state-dtype", "int8", "--keep-f32", "bias"]);
    assert!(error.contains("state of smaller ones stays in f32 anyway"), "{error}");
    let error = refused(&["--state-dtype", "int4"]);
    assert!(error.contains("expected f32, bf16 or int8"), "{error}");
    let error = refused(&["--state-dtype", "f32"]);
    assert!(error.contains("found none: it is f32 already"), "{error}");
    for flags in ["--optimizer sgd", "--dtype f16", "--dtype f64", "--optimizer rmsprop --centered"]
    {
        let other = folder.path(&flags.replace(' ', ""));
        hash(&format!("train --epochs 1 {flags}"), &other, &[]);
        let all = ["checkpoint", "convert", text(&other), "--out", text(&to)];
        let error = crate::refused(&[&all[..], &["--state-dtype", "int8"]].concat());
        assert!(error.contains("state that int8") || error.contains("has codes for"), "{error}");
        assert!(!to.exists());
    }
    let free = folder.path("free");
    hash("train --epochs 1 --optimizer schedule-free", &free, &[]);
    let all = ["checkpoint", "convert", text(&free), "--out", text(&to), "--state-dtype", "int8"];
    let error = crate::refused(&all);
    assert!(error.contains("@base") && error.contains("a list that int8 has codes for"), "{error}");
    assert!(!to.exists());
}

#[test]
fn a_state_file_goes_on_in_int8_and_in_f32_again() {
    let folder = Folder::new();
    let run = folder.path("run");
    hash("train --epochs 1", &run, &[]);
    let model = run.join("step-00000045-a/model.safetensors");
    let [wide, coded, back] =
        ["wide", "coded", "back"].map(|name| folder.path(&format!("{name}.safetensors")));
    let (first, last) = (folder.path("first.safetensors"), folder.path("last.safetensors"));
    let grads = ["--grads", text(&model), "--out"];
    let begin = ["step", "--params", text(&model), "--state-out", text(&wide)];
    ok(&[&begin[..], &grads, &[text(&first)]].concat());
    let convert = |from: &Path, to: &Path, flags: &[&str]| {
        let all =
            ["checkpoint", "convert", text(from), "--params", text(&first), "--out", text(to)];
        ok(&[&all[..], flags].concat())
    };
    let told = convert(&wide, &coded, &["--state-dtype", "int8", "--keep-f32", "layer1"]);
    assert!(told.contains("4 tensors in other types, for state in int8"), "{told}");
    let go_on = ["step", "--params", text(&first), "--state", text(&coded)];
    let go_on = [&go_on[..], &grads, &[text(&last)]].concat();
    let error = refused(&go_on);
    let said = "layer0.weight@moment1`: expected state in f32, found state in int8; give \
                --state-dtype int8, or convert it by `fusestep checkpoint convert --state-dtype f32`";
    assert!(error.contains(said), "{error}");
    let int8 = ["--state-dtype", "int8", "--keep-f32", "layer1"];
    let after = folder.path("after.safetensors");
    ok(&[&go_on[..], &int8, &["--state-out", text(&after)]].concat());
    let json = convert(&after, &back, &["--state-dtype", "f32", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["layer0.weight@moment2"]["dtype"], "f32");
    assert!(json.get("layer0.weight@moment2_units").is_none() && json.get("x@param").is_none());
    let go_on = ["step", "--params", text(&last), "--state", text(&back)];
    ok(&[&go_on[..], &grads, &[text(&first)]].concat());
}

#[test]
fn state_files_that_cannot_be_converted_are_refused_by_name() {
    let folder = Folder::new();
    let run = folder.path("run");
    hash("train --epochs 1", &run, &[]);
    let model = run.join("step-00000045-a/model.safetensors");
    let [state, out, other] =
        ["state", "out", "other"].map(|name| folder.path(&format!("{name}.safetensors")));
    let begin = ["step", "--params", text(&model), "--grads", text(&model)];
    ok(&[&begin[..], &["--out", text(&out), "--state-out", text(&state)]].concat());
    let refused = |from: &Path, flags: &[&str]| {
        let before = std::fs::read(&out).unwrap();
        let all = ["checkpoint", "convert", text(from), "--state-dtype", "int8", "--out"];
        let error = refused(&[&all[..], flags].concat());
        assert!(!other.exists() && std::fs::read(&out).unwrap() == before, "{error}");
        error
    };
    let error = refused(&state, &[text(&other)]);
    assert!(error.contains("or --params FILE beside a state file"), "{error}");
    let error = refused(&run, &[text(&other), "--params", text(&model)]);
    assert!(error.contains("expected a state file, found a checkpoint's folder"), "{error}");
    let error = refused(&state, &[text(&out), "--params", text(&out)]);
    assert!(error.contains("--out: expected another file than --params"), "{error}");
    let error = refused(&state, &[text(&other), "--params", text(&state)]);
    assert!(error.contains("expected state of the parameters given"), "{error}");
    let kept = [text(&other), "--params", text(&model), "--keep-f32", "layer9"];
    let error = refused(&state, &kept);
    assert!(error.contains("--keep-f32 layer9: expected a part of the name"), "{error}");
    let error = refused(&model, &[text(&other), "--params", text(&model)]);
    assert!(error.contains("`format`: expected fusestep-state"), "{error}");
}
