//! Training on many ranks, their plans and checkpoints, as a user sees them.

use std::fs;

use serde_json::Value;

use crate::{Folder, ok, refused, text};

fn train(more: &[&str]) -> Value {
    let mut args = vec!["train", "--json", "--epochs", "2"];
    args.extend(more);
    serde_json::from_str(&ok(&args)).unwrap()
}

#[test]
fn four_ranks_train_to_the_same_bits_however_they_share_the_work() {
    for rule in ["adamw", "momentum", "lars"] {
        let base = ["--ranks", "4", "--clip-norm", "1", "--optimizer", rule];
        let run = |more: &[&str]| train(&[&base, more].concat());
        let whole = run(&[]);
        assert_eq!(
            (&whole["ranks"], &whole["zero"], &whole["engine"]),
            (&4.into(), &0.into(), &"thread".into())
        );
        let ways: [&[&str]; 6] = [
            &["--naive"],
            &["--zero", "1", "--bucket-cap-mib", "0.01"],
            &["--zero", "2", "--rings", "2", "--bucket-cap-mib", "0.02"],
            &["--zero", "3", "--rings", "1"],
            &["--zero", "3", "--naive"],
            &["--zero", "2", "--threads", "1"],
        ];
        for way in ways {
            let found = run(way);
            assert_eq!(found["params_hash"], whole["params_hash"], "{rule} {way:?}");
            assert_eq!(found["final_loss"], whole["final_loss"], "{rule} {way:?}");
        }
    }
}

#[test]
fn state_and_layers_in_use_shrink_as_the_stage_promises() {
    let number = |run: &Value, key: &str| run[key].as_u64().unwrap();
    let (whole, shared) = (
        train(&["--ranks", "4"]),
        train(&["--ranks", "4", "--zero", "1"]),
    );
    let (all, part) = (
        number(&whole, "state_bytes_per_rank"),
        number(&shared, "state_bytes_per_rank"),
    );
    assert!(part < all / 4 + 6 * 512, "{part} of {all}");
    let third = train(&["--ranks", "4", "--zero", "3"]);
    let (peak, parameters) = (
        number(&third, "layer_peak_bytes"),
        number(&third, "parameter_bytes"),
    );
    // The largest layer, and its tensors beside the gathered copy.
    assert!(peak < parameters, "{peak} of {parameters}");
}

#[test]
fn merged_batches_train_as_larger_ones_and_merging_one_changes_nothing() {
    let momentum = ["--optimizer", "momentum", "--ranks", "1"];
    let run = |more: &[&str]| train(&[&momentum, more].concat());
    let (merged, large) = (
        run(&["--batch", "16", "--gradient-merge", "4"]),
        run(&["--batch", "64"]),
    );
    assert_eq!(merged["steps"], large["steps"]);
    let loss = |run: &Value| run["final_loss"].as_f64().unwrap();
    assert!(
        (loss(&merged) - loss(&large)).abs() < 1e-4,
        "{merged} {large}"
    );
    let plain = train(&["--ranks", "2"]);
    let one = train(&["--ranks", "2", "--gradient-merge", "1"]);
    assert_eq!(plain["params_hash"], one["params_hash"]);
    let local = train(&["--ranks", "2", "--local-sgd", "4"]);
    assert!(local["test_accuracy"].as_f64().unwrap() > 0.5);
    let error = refused(&["train", "--ranks", "2", "--zero", "2", "--local-sgd", "2"]);
    assert!(error.contains("zero stage 2 and local_sgd"), "{error}");
}

#[test]
fn a_run_resumed_on_the_same_ranks_ends_with_the_same_parameters_and_on_others_goes_on() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let base = ["--ranks", "4", "--zero", "2", "--batch", "32"];
    let run = |more: &[&str]| train(&[&base, more].concat());
    let whole = run(&[]);
    let first = {
        let args = [
            "train",
            "--json",
            "--epochs",
            "1",
            "--checkpoint",
            text(&path),
        ];
        serde_json::from_str::<Value>(&ok(&[&args[..], &base].concat())).unwrap()
    };
    assert_ne!(first["params_hash"], whole["params_hash"]);
    let saved = fs::read_to_string(path.join("manifest.json")).unwrap();
    let resumed = run(&["--checkpoint", text(&path), "--resume"]);
    assert_eq!(resumed["params_hash"], whole["params_hash"]);
    assert_ne!(
        fs::read_to_string(path.join("manifest.json")).unwrap(),
        saved
    );

    let verified: Value =
        serde_json::from_str(&ok(&["checkpoint", "verify", text(&path), "--json"])).unwrap();
    assert_eq!(
        (&verified["intact"], &verified["shards"]),
        (&true.into(), &4.into())
    );
    assert!(ok(&["checkpoint", "inspect", text(&path)]).contains("layer0.weight@moment1"));
    let other = folder.path("resharded");
    ok(&[
        "checkpoint",
        "reshard",
        text(&path),
        "--world",
        "3",
        "--out",
        text(&other),
    ]);
    for ranks in ["1", "3"] {
        let args = [
            "train",
            "--json",
            "--epochs",
            "3",
            "--ranks",
            ranks,
            "--checkpoint",
            text(&other),
            "--resume",
        ];
        let went_on: Value = serde_json::from_str(&ok(&args)).unwrap();
        assert!(went_on["test_accuracy"].as_f64().unwrap() > 0.8);
    }
    let error = refused(&[
        "train",
        "--ranks",
        "2",
        "--seed",
        "5",
        "--checkpoint",
        text(&path),
        "--resume",
    ]);
    assert!(error.contains("seed"), "{error}");
    let error = refused(&[
        "train",
        "--ranks",
        "2",
        "--optimizer",
        "lion",
        "--checkpoint",
        text(&path),
        "--resume",
    ]);
    assert!(error.contains("optimizer"), "{error}");
}

#[test]
fn plans_of_many_ranks_count_their_calls() {
    let shapes = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../data/shapes/resnet50.json"
    );
    let run = |more: &[&str]| -> Value {
        serde_json::from_str(&ok(&[&["plan", shapes, "--json"], more].concat())).unwrap()
    };
    let plan = run(&["--world", "8", "--zero", "2", "--bucket-cap-mib", "25"]);
    let number = |key: &str| plan[key].as_u64().unwrap();
    // 97.5 MiB of gradients in buckets of 25, and one gather of the parameters.
    assert_eq!(
        (number("collectives"), number("naive_collectives")),
        (6, 322)
    );
    let bytes = 25_557_032 * 4;
    assert!(number("bytes_on_wire").abs_diff(2 * bytes * 7 / 8) < 1_000);
    assert!(number("state_bytes_per_rank").abs_diff(2 * bytes / 8) < 200_000);
    assert!(plan["predicted_step_ns"].as_f64().unwrap() > 0.0);
    let naive = run(&["--world", "8", "--naive"]);
    assert_eq!(naive["collectives"], naive["naive_collectives"]);
    let error = refused(&["plan", shapes, "--world", "2", "--bucket-cap-mib", "0"]);
    assert!(error.contains("--bucket-cap-mib"), "{error}");
}
