//! State that a run has made infinite or NaN.

use std::fs;
use std::path::Path;

use crate::{Folder, fusestep, ok, text, write};

#[test]
fn state_that_is_not_finite_is_told_of_and_gone_on_from() {
    let folder = Folder::new();
    let (params, grads) = (folder.path("p"), folder.path("g"));
    write(&params, &[("w", vec![0.5; 3]), ("b", vec![1.0])]);
    write(&grads, &[("w", vec![0.1, 3e19, 0.2]), ("b", vec![f32::NAN])]);
    let step = |params: &Path, more: &[&str]| {
        let base = ["step", "--params", text(params), "--grads", text(&grads)];
        let output = fusestep(&[&base[..], more].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        error
    };
    let at = |name: &str| folder.path(name);
    let (one, state, two, whole) = (at("one"), at("state"), at("two"), at("whole"));
    let told = step(&params, &["--out", text(&one), "--state-out", text(&state)]);
    assert!(
        told.contains("`b@moment1` and 2 others have values that are not finite")
            && told.contains("--clip-norm")
            && told.contains("--loss-scale"),
        "{told}"
    );
    step(&one, &["--state", text(&state), "--out", text(&two)]);
    step(&params, &["--steps", "2", "--out", text(&whole)]);
    assert_eq!(fs::read(&two).unwrap(), fs::read(&whole).unwrap());
    let checkpoint = at("checkpoint");
    let train = |more: &[&str]| {
        let base = "train --optimizer adam --weight-decay 1e25 --epochs";
        let base: Vec<&str> = base.split(' ').collect();
        let output = fusestep(&[&base[..], more, &["--checkpoint", text(&checkpoint)]].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        error
    };
    let told = train(&["1"]);
    assert_eq!(told.matches("values that are not finite, and a run").count(), 1, "{told}");
    let verified = ok(&["checkpoint", "verify", text(&checkpoint)]);
    assert!(verified.contains("all intact; `") && verified.contains("not finite"), "{verified}");
    train(&["2", "--resume"]);
}

#[test]
fn parameters_that_are_not_finite_are_told_of() {
    let folder = Folder::new();
    let (params, grads, out) = (folder.path("p"), folder.path("g"), folder.path("out"));
    write(&params, &[("w", vec![3e38; 3]), ("b", vec![1.0])]);
    write(&grads, &[("w", vec![-1.0; 3]), ("b", vec![1.0])]);
    let files = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let output = fusestep(&[&files[..], &["--lr", "3e38", "--weight-decay", "0"]].concat());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    assert!(told.contains("`w` has values that are not finite"), "{told}");
    let output = fusestep(&[&files[..], &["--lr", "1e-3"]].concat());
    assert!(output.status.success() && output.stderr.is_empty());
}
