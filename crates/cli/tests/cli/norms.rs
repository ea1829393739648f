//! Rules that take norms: parameters that are excluded, tensors that are not finite.

use serde_json::Value;

use crate::{Folder, fusestep, refused, tensor, text, write};

#[test]
fn excluded_parameters_have_no_decay_and_a_pattern_without_a_match_is_named() {
    let folder = Folder::new();
    let (params, grads) = (folder.path("params"), folder.path("grads"));
    write(&params, &[("bn.bias", vec![3.0, 4.0]), ("w", vec![3.0, 4.0])]);
    write(&grads, &[("bn.bias", vec![0.6, 0.8]), ("w", vec![0.6, 0.8])]);
    let run = |more: &[&str]| {
        let out = folder.path("out");
        let mut args = vec!["step", "--params", text(&params), "--grads", text(&grads)];
        args.extend(["--optimizer", "lars", "--lr", "1", "--out", text(&out)]);
        args.extend(more);
        let output = fusestep(&args);
        assert!(output.status.success(), "{output:?}");
        let values = |name| -> Vec<f32> { bytemuck::pod_collect_to_vec(&tensor(&out, name)) };
        let warning = String::from_utf8(output.stderr).unwrap();
        (values("bn.bias"), values("w"), warning)
    };
    let near = |found: &[f32], expected: [f32; 2]| {
        found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-6)
    };
    let (bias, w, warning) = run(&["--exclude", "bn."]);
    assert!(near(&bias, [2.4, 3.2]) && near(&w, [2.997, 3.996]), "{bias:?} {w:?}");
    assert_eq!(warning, "");
    let (bias, ..) = run(&["--exclude", "bn.", "--excluded", "trust-ratio"]);
    assert!(near(&bias, [2.997, 3.996]), "{bias:?}");
    let out = folder.path("other");
    let mut args = vec!["step", "--params", text(&params), "--grads", text(&grads)];
    args.extend(["--optimizer", "lars", "--out", text(&out)]);
    for (flag, value) in
        [("--exclude", "norm"), ("--lr-scale", "norm=2"), ("--trust-of", "norm=plain")]
    {
        let error = refused(&[&args[..], &[flag, value]].concat());
        let said = [flag, "such as `bn.bias` or `w`", "found `norm`", "in none of 2"];
        assert!(said.iter().all(|said| error.contains(said)), "{error}");
    }
    assert!(!out.exists());
}

#[test]
fn a_tensor_that_is_not_finite_is_left_and_counted() {
    let folder = Folder::new();
    let (params, grads, out) = (folder.path("params"), folder.path("grads"), folder.path("out"));
    write(&params, &[("a", vec![3.0, 4.0]), ("b", vec![3.0, 4.0])]);
    write(&grads, &[("a", vec![f32::NAN, 0.8]), ("b", vec![0.6, 0.8])]);
    let args = [
        "step",
        "--params",
        text(&params),
        "--grads",
        text(&grads),
        "--out",
        text(&out),
        "--optimizer",
        "lamb",
        "--json",
    ];
    let output = fusestep(&args);
    let warning = String::from_utf8(output.stderr).unwrap();
    assert!(warning.contains("left as they were 1 time:"), "{warning}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["tensors_skipped"], 1);
    assert!(tensor(&out, "a") == tensor(&params, "a") && tensor(&out, "b") != tensor(&params, "b"));
}
