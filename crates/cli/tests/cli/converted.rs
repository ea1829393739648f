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
