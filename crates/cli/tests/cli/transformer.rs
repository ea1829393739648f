//! `train --model transformer`, as tiny as its flags make it.

use serde_json::Value;

use crate::{Folder, ok, refused, text};

/// A transformer of some 11,000 elements on the text.
const TINY: [&str; 11] = [
    "train",
    "--model",
    "transformer",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "8",
];

fn train(more: &[&str]) -> Value {
    let args = [&TINY[..], &["--json"], more].concat();
    serde_json::from_str(&ok(&args)).unwrap()
}

#[test]
fn ranks_have_the_hash_of_one_process_with_as_many_micro_steps_and_of_a_resumed_run() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let run = |epochs: &str, flags: &str| {
        let schedule = ["--epochs", epochs, "--schedule", "warmup:10,cosine:128"];
        let flags: Vec<&str> = flags.split(' ').collect();
        train(&[&schedule[..], &flags].concat())
    };
    let whole = run("2", "--batch 2 --accumulate 4");
    for ranks in ["--zero 0", "--zero 1", "--zero 2"] {
        let ranks = run("2", &format!("--batch 8 --ranks 4 {ranks}"));
        assert_eq!(ranks["params_hash"], whole["params_hash"], "{ranks}");
        assert_eq!(ranks["steps"], 128);
    }
    let saved = format!("--batch 8 --ranks 4 --zero 1 --checkpoint {}", text(&path));
    assert_ne!(run("1", &saved)["params_hash"], whole["params_hash"]);
    let resumed = run("2", &format!("{saved} --resume"));
    assert_eq!(resumed["params_hash"], whole["params_hash"]);
    let losses = |key: &str| {
        let epochs = whole["history"].as_array().unwrap().iter();
        epochs.map(|epoch| epoch[key].as_f64().unwrap()).collect()
    };
    for key in ["loss", "test_loss"] {
        let losses: Vec<f64> = losses(key);
        assert!(losses[1] < losses[0] && losses[1] < 3.6, "{key}: {losses:?}");
    }
    assert_eq!(whole["written"].as_str().unwrap().chars().count(), 201);
}

#[test]
fn train_says_how_fast_it_learns_and_how_much_of_that_is_the_step() {
    let found = train(&["--epochs", "1", "--ranks", "2"]);
    assert_eq!(found["model"], "transformer");
    let share = found["step_share"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{found}");
    assert!(found["tokens_per_second"].as_f64().unwrap() > 0.0);
    let printed = ok(&[&TINY[..], &["--epochs", "1"]].concat());
    for part in ["characters a second", "epoch 1: loss", "it writes:"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert!(printed.contains("candle's AdamW on the same gradients"));
}

#[test]
fn each_model_has_learning_rates_of_its_own_at_which_all_rules_learn() {
    let help = ok(&["train", "--help"]);
    let listed = help.split("without --lr").nth(1).unwrap();
    let mut rules = 0;
    for line in listed.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [rule, _, rate] = words[..] else { continue };
        let found = train(&["--epochs", "4", "--optimizer", rule]);
        assert_eq!(found["lr"], rate.parse::<f64>().unwrap(), "{rule}");
        let loss = found["test_loss"].as_f64().unwrap();
        // Without any step it is ln 65 = 4.17; so narrow, the model could bear larger ones.
        assert!(loss < 3.7, "{rule}: {loss}");
        rules += 1;
    }
    let error = refused(&["train", "--optimizer", "none"]);
    let known = error.split("possible values: ").nth(1).unwrap().split(']').next().unwrap();
    assert_eq!(rules, known.split(", ").count(), "{listed}\n{known}");
    let lr = |more: &[&str]| train(&[&["--epochs", "1"], more].concat())["lr"].clone();
    assert_eq!(lr(&["--lr", "0.5"]), 0.5);
    let digits: Value = serde_json::from_str(&ok(&["train", "--epochs", "1", "--json"])).unwrap();
    assert_eq!(digits["lr"], 2e-3);
    assert_eq!(lr(&[]), 1e-3);
}

#[test]
fn sizes_that_make_no_transformer_are_refused() {
    let error = refused(&["train", "--width", "16"]);
    assert!(error.contains("--width: expected --model transformer"), "{error}");
    let error = refused(&["train", "--model", "transformer", "--heads", "3"]);
    assert!(
        error.contains("--width: expected a multiple of the 3 of --heads, found 256"),
        "{error}"
    );
    let error = refused(&["train", "--model", "transformer", "--context", "70000"]);
    assert!(error.contains("--context <N>': expected a number from 1 to 65536"), "{error}");
    let error = refused(&["train", "--model", "transformer", "--context", "1025"]);
    assert!(
        error.contains("of at most 4194304, found 4202500; take a smaller --context"),
        "{error}"
    );
}
