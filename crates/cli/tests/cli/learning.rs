//! Every rule learns with what `train` takes by default, whatever is excluded and however
//! parameters are kept.

use serde_json::Value;

use crate::{fusestep, ok, rule_names};

fn trained(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["train", "--json"], args].concat())).unwrap()
}

#[test]
fn every_rule_learns_with_excluded_parameters_in_every_dtype() {
    // Three epochs of the digits get to 0.86 with every rule and nothing excluded.
    for rule in rule_names() {
        let base = ["--epochs", "3", "--optimizer", rule];
        let excluded = ["--exclude", "bias", "--weight-decay", "0.001"];
        for kept in [
            &[][..],
            &["--dtype", "f64"],
            &["--dtype", "bf16", "--master-weights", "f32"],
            &["--dtype", "f16", "--master-weights", "f32"],
        ] {
            let found = trained(&[&base[..], &excluded, kept].concat());
            let accuracy = found["test_accuracy"].as_f64().unwrap();
            assert!(accuracy >= 0.8, "{rule} {kept:?}: {accuracy}");
        }
    }
}

#[test]
fn every_rule_learns_the_text_with_excluded_parameters() {
    let small = ["--layers", "1", "--width", "32", "--context", "16", "--epochs", "2"];
    let model = [&["--model", "transformer"], &small[..]].concat();
    for rule in rule_names() {
        let rule = ["--optimizer", rule, "--exclude", "norm", "--weight-decay", "0.001"];
        let found = trained(&[&model[..], &rule].concat());
        let loss = found["test_loss"].as_f64().unwrap();
        // Guesses among 65 characters have 4.17.
        assert!(loss < 3.8, "{rule:?}: {loss}");
    }
}

#[test]
fn a_model_that_has_learned_nothing_is_warned_of() {
    let warned = |args: &[&str]| {
        let output = fusestep(&[&["train", "--json", "--epochs", "1"], args].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = warned(&["--optimizer", "sgd", "--lr", "0"]);
    assert!(said.contains("warning: the model has learned nothing"), "{said}");
    let plain = ["--optimizer", "lars", "--exclude", "bias", "--excluded", "plain-lr"];
    assert!(warned(&plain).contains("warning: the model has learned nothing"));
    assert!(!warned(&[]).contains("warning"));
}
