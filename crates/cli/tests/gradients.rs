//! Clipping, loss scaling and norms of updates of the built command.

use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;

/// Writes one tensor `w`.
fn write(path: &Path, values: &[f32]) {
    let view = TensorView::new(Dtype::F32, vec![values.len()], bytemuck::cast_slice(values));
    std::fs::write(path, serialize([("w", view.unwrap())], None).unwrap()).unwrap();
}

/// The bytes of `w`.
fn read(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor("w").unwrap().data().to_vec()
}

struct Model {
    folder: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = Self { folder };
        let values =
            |scale: f32| -> Vec<f32> { (0..70_001).map(|i| (i % 97) as f32 * scale).collect() };
        write(&model.path("p"), &values(0.01));
        write(&model.path("g"), &values(0.001));
        write(&model.path("scaled"), &values(0.001 * 1024.0));
        let mut bad = values(0.001);
        bad[69_999] = f32::INFINITY;
        write(&model.path("bad"), &bad);
        model
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, grads: &str, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.arg("step").arg("--params").arg(self.path("p"));
        command.arg("--grads").arg(self.path(grads));
        command.arg("--out").arg(self.path(out)).args(more);
        command
    }

    /// Runs `step` on these gradients into `out`; standard output, or standard error if it is
    /// refused.
    fn step(&self, grads: &str, out: &str, more: &[&str]) -> Result<Value, String> {
        let output = self.command(grads, out, more).arg("--json").output().unwrap();
        if output.status.success() {
            Ok(serde_json::from_slice(&output.stdout).unwrap())
        } else {
            Err(String::from_utf8(output.stderr).unwrap())
        }
    }
}

#[test]
fn a_scaled_loss_gives_the_bits_of_an_unscaled_one() {
    let model = Model::new();
    let clip = ["--clip-norm", "0.5", "--steps", "2"];
    let plain = model.step("g", "plain", &clip).unwrap();
    let norm = plain["grad_norm"].as_f64().unwrap();
    assert!(norm > 0.5 && plain["loss_scale"].is_null() && plain["skipped"] == 0);
    // Of one tensor the norm of all is its own.
    let gradient = &plain["gradients"][0];
    assert_eq!((&gradient["name"], &gradient["non_finite"]), (&"w".into(), &0.into()));
    assert_eq!(gradient["norm"].as_f64(), Some(norm));
    for more in [&["--threads", "1"][..], &["--naive"], &[]] {
        let args = [&clip[..], &["--loss-scale", "1024"], more].concat();
        let scaled = model.step("scaled", "scaled_out", &args).unwrap();
        assert_eq!(scaled["grad_norm"].as_f64(), Some(norm));
        assert_eq!(scaled["gradients"], plain["gradients"]);
        assert_eq!(scaled["loss_scale"], 1024.0);
        assert!(read(&model.path("scaled_out")) == read(&model.path("plain")));
    }
    model.step("g", "unclipped", &["--steps", "2"]).unwrap();
    assert!(read(&model.path("unclipped")) != read(&model.path("plain")));
}

#[test]
fn a_gradient_that_is_not_finite_skips_and_the_state_file_remembers_the_scale() {
    let model = Model::new();
    let state = model.path("state");
    let state = state.to_str().unwrap();
    let args = ["--loss-scale", "dynamic", "--state-out", state];
    let found = model.step("bad", "out", &args).unwrap();
    assert_eq!((&found["skipped"], &found["step"]), (&1.into(), &0.into()));
    assert_eq!(found["loss_scale"], 32_768.0);
    assert_eq!(found["gradients"][0]["non_finite"], 1);
    assert!(read(&model.path("out")) == read(&model.path("p")));
    let again = [&args[..], &["--state", state, "--steps", "2"]].concat();
    let found = model.step("bad", "out", &again).unwrap();
    assert_eq!((&found["skipped"], &found["loss_scale"]), (&2.into(), &8192.0.into()));
    let found = model.step("g", "out", &["--loss-scale", "dynamic", "--state", state]).unwrap();
    assert_eq!((&found["skipped"], &found["step"]), (&0.into(), &1.into()));
}

#[test]
fn a_skipped_step_names_the_gradients_at_fault() {
    let model = Model::new();
    for (grads, named) in [("bad", true), ("g", false)] {
        let output = model.command(grads, "out", &["--clip-norm", "1"]).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let line = "gradient `w`: expected finite elements, found 1 infinite or NaN\n";
        assert_eq!(text.contains(line), named, "{text}");
    }
}

#[test]
fn an_update_is_measured_and_changes_no_bit() {
    let model = Model::new();
    let plain = model.step("g", "plain", &["--lr", "0.01"]).unwrap();
    assert!(plain["update_norm"].is_null() && plain["updates"].is_null());
    let mut found = Vec::new();
    for more in [&["--threads", "1"][..], &["--naive"], &[]] {
        let args = [&["--update-norms", "--lr", "0.01"], more].concat();
        let measured = model.step("g", "measured", &args).unwrap();
        assert!(read(&model.path("measured")) == read(&model.path("plain")));
        found.push((measured["update_norm"].clone(), measured["updates"].clone()));
    }
    assert!(found.iter().all(|other| *other == found[0]), "{found:?}");
    let (norm, updates) = &found[0];
    assert_eq!(updates[0]["name"], "w");
    assert_eq!(&updates[0]["norm"], norm);
    // Of the files' own values.
    let values =
        |name: &str| -> Vec<f32> { bytemuck::pod_collect_to_vec(&read(&model.path(name))) };
    let (before, after) = (values("p"), values("plain"));
    let change = |(b, a): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    let expected = before.iter().zip(&after).map(change).sum::<f64>().sqrt();
    let found = norm.as_f64().unwrap();
    assert!((found / expected - 1.0).abs() < 1e-12 && expected > 0.1, "{found} {expected}");

    let skipped = ["--update-norms", "--loss-scale", "dynamic"];
    let skipped = model.step("bad", "out", &skipped).unwrap();
    assert_eq!((&skipped["skipped"], &skipped["update_norm"]), (&1.into(), &0.0.into()));
    let none = ["--update-norms", "--steps", "0"];
    let none = model.step("g", "out", &none).unwrap();
    assert!(none["update_norm"].is_null() && none["updates"].is_null());
    let output = model.command("g", "out", &["--update-norms"]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(text.contains("norm of the last update: ") && text.ends_with("  w\n"), "{text}");
}

#[test]
fn values_out_of_range_are_refused_and_nothing_is_written() {
    let model = Model::new();
    for (args, message) in [
        (
            ["--clip-norm", "0"],
            "'0' for '--clip-norm <CLIP_NORM>': expected a finite number above 0",
        ),
        (
            ["--clip-norm", "-1"],
            "'-1' for '--clip-norm <CLIP_NORM>': expected a finite number above 0",
        ),
        (["--loss-scale", "3"], "expected a power of two from 1 to 2^126 such as 1024 or"),
        (["--loss-scale", "huge"], "'huge' for '--loss-scale"),
    ] {
        let error = model.step("g", "out", &args).unwrap_err();
        assert!(error.contains(message), "{error}");
        assert!(!model.path("out").exists());
    }
}
