//! The built command, as a user meets it: results, bad input, files that survive.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;

#[path = "cli/checkpoints.rs"]
mod checkpoints;
#[path = "cli/config.rs"]
mod config;
#[path = "cli/converted.rs"]
mod converted;
#[path = "cli/counts.rs"]
mod counts;
#[path = "cli/effects.rs"]
mod effects;
#[path = "cli/figures.rs"]
mod figures;
#[path = "cli/lanes.rs"]
mod lanes;
#[path = "cli/launchers.rs"]
mod launchers;
#[path = "cli/learning.rs"]
mod learning;
#[cfg(target_os = "linux")]
#[path = "cli/limits.rs"]
mod limits;
#[path = "cli/losses.rs"]
mod losses;
#[path = "cli/messages.rs"]
mod messages;
#[path = "cli/models.rs"]
mod models;
#[path = "cli/non_finite.rs"]
mod non_finite;
#[path = "cli/norms.rs"]
mod norms;
#[path = "cli/numbers.rs"]
mod numbers;
#[path = "cli/outputs.rs"]
mod outputs;
#[path = "cli/precision.rs"]
mod precision;
#[path = "cli/ranks.rs"]
mod ranks;
#[path = "cli/records.rs"]
mod records;
#[path = "cli/report.rs"]
mod report;
#[path = "cli/resumed.rs"]
mod resumed;
#[path = "cli/runs.rs"]
mod runs;
#[path = "cli/said.rs"]
mod said;
#[path = "cli/stumbles.rs"]
mod stumbles;
#[path = "cli/told.rs"]
mod told;
#[path = "cli/transformer.rs"]
mod transformer;
#[path = "cli/trust.rs"]
mod trust;
#[path = "cli/verify.rs"]
mod verify;
#[path = "cli/writers.rs"]
mod writers;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Parameters and gradients that belong together.
    fn model(&self) -> (PathBuf, PathBuf) {
        let sizes = [("b", 1), ("a", 17), ("empty", 0), ("c", 70_001)];
        let scaled = |factor: f32| -> Vec<(&str, Vec<f32>)> {
            let values = |numel: usize| -> Vec<f32> {
                let value = |i: usize| ((i * 7919 + 13) % 1999) as f32 * factor - 1000.0 * factor;
                (0..numel).map(value).collect()
            };
            let tensors = sizes.iter().map(|&(name, numel)| (name, values(numel)));
            tensors.collect()
        };
        let (params, grads) = (self.path("p.safetensors"), self.path("g.safetensors"));
        write(&params, &scaled(1e-4));
        write(&grads, &scaled(-1e-5));
        (params, grads)
    }

    fn files(&self) -> usize {
        fs::read_dir(self.0.path()).unwrap().count()
    }
}

fn write(path: &Path, tensors: &[(&str, Vec<f32>)]) {
    let views = tensors.iter().map(|(name, values)| {
        let view = TensorView::new(Dtype::F32, vec![values.len()], bytemuck::cast_slice(values));
        (*name, view.unwrap())
    });
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, serialize(views, Some(metadata)).unwrap()).unwrap();
}

/// A tensor's bytes and the metadata of a file.
fn tensor(path: &Path, name: &str) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(name).unwrap().data().to_vec()
}

fn fusestep(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
    // What `check` has kept for this user decides no test.
    command.env("FUSESTEP_FIGURES", "none").args(args).output().unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = fusestep(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The message of a run that must fail without a panic.
fn refused(args: &[&str]) -> String {
    let output = fusestep(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}: {:?} {error}", output.status);
    assert!(error.contains("error: "), "{args:?}: {error}");
    error
}

/// Every rule with some of its flags.
const RULES: [&str; 12] = [
    "adamw",
    "adam",
    "sgd --rescale 0.5 --weight-decay 0.1 --decay decoupled",
    "momentum --momentum 0.8 --nesterov --weight-decay 0.1",
    "lion --beta2 0.98",
    "adagrad --lr-decay 0.1 --initial-sum 0.1",
    "rmsprop --alpha 0.9 --centered --momentum 0.5",
    "schedule-free --warmup-steps 3",
    "lars --trust-coefficient 1",
    "lamb",
    "adamax --eps 1e-6 --weight-decay 0.1",
    "nadam --momentum-decay 0.1 --weight-decay 0.1 --decay decoupled",
];

/// Every value of `--optimizer`.
fn rule_names() -> impl Iterator<Item = &'static str> {
    RULES.iter().filter_map(|rule| rule.split(' ').next())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_step_is_the_same_however_it_runs_and_keeps_the_files_metadata() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let run = |out: &str, more: &[&str]| {
        let out = folder.path(out);
        let mut args = vec!["step", "--params", text(&params), "--grads", text(&grads)];
        args.extend(["--lr", "1e-2", "--out", text(&out)]);
        args.extend(more);
        ok(&args);
        fs::read(&out).unwrap()
    };
    for rule in RULES {
        let optimizer: Vec<&str> = rule.split(' ').collect();
        let first =
            run("first", &[&["--steps", "3", "--optimizer"], optimizer.as_slice()].concat());
        for more in [
            vec!["--naive"],
            vec!["--threads", "1"],
            vec!["--threads", "3"],
            vec!["--argument-bytes", "4096"],
            vec!["--argument-bytes", "200", "--threads", "2"],
        ] {
            let mut args = vec!["--steps", "3", "--optimizer"];
            args.extend(&optimizer);
            args.extend(more);
            assert!(run("other", &args) == first, "{args:?}");
        }
        assert!(first != fs::read(&params).unwrap(), "{rule}");
        let file = SafeTensors::read_metadata(&first).unwrap().1;
        assert_eq!(file.metadata().as_ref().unwrap()["format"], "pt");
    }
    let amsgrad = run("amsgrad", &["--steps", "2", "--amsgrad", "--maximize"]);
    assert!(run("amsgrad", &["--steps", "2", "--amsgrad", "--maximize", "--naive"]) == amsgrad);
}

#[test]
fn three_steps_are_one_and_two_through_the_state_file() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [whole, one, three, state, state_3] =
        ["whole", "one", "three", "state", "state3"].map(|name| folder.path(name));
    let run = |params: &Path, out: &Path, state_out: &Path, more: &[&str]| {
        let mut args = vec!["step", "--params", text(params), "--grads", text(&grads)];
        args.extend(["--out", text(out), "--state-out", text(state_out), "--lr", "0.01"]);
        args.extend(more);
        ok(&args)
    };
    run(&params, &whole, &state_3, &["--steps", "3"]);
    run(&params, &one, &state, &["--steps", "1"]);
    let json = run(&one, &three, &state, &["--steps", "2", "--state", text(&state), "--json"]);
    assert_eq!(fs::read(&whole).unwrap(), fs::read(&three).unwrap());
    // The header's order is a hash map's, the tensors are not.
    assert_eq!(tensor(&state, "c@moment1"), tensor(&state_3, "c@moment1"));
    assert_eq!(tensor(&state, "c@moment2"), tensor(&state_3, "c@moment2"));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["steps"], &json["step"]), (&2.into(), &3.into()));
    let bytes = fs::read(&state).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1;
    assert_eq!(metadata.metadata().as_ref().unwrap()["step"], "3");
}

#[test]
fn settings_out_of_range_are_refused_and_nothing_is_written() {
    let folder = Folder::new();
    let out = folder.path("out");
    for (more, message) in [
        (vec!["--lr", "nan"], "lr: expected a finite value of at least 0, found NaN"),
        (vec!["--lr", "-1"], "lr: expected a finite value of at least 0, found -1"),
        (vec!["--lr", "inf"], "lr: expected a finite value of at least 0, found inf"),
        (vec!["--beta1", "1"], "beta1: expected a value in [0, 1), found 1"),
        (vec!["--beta2", "-0.1"], "beta2: expected a value in [0, 1), found -0.1"),
        (vec!["--eps", "-1e-8"], "eps: expected a finite value of at least 0"),
        (vec!["--weight-decay", "-1"], "--weight-decay: expected a finite value of at least 0"),
        (
            vec!["--optimizer", "nosuch"],
            "possible values: adamw, adam, sgd, momentum, lion, adagrad, rmsprop, schedule-free",
        ),
        (vec!["--argument-bytes", "40"], "argument"),
        (vec!["--threads", "0"], "--threads"),
        (vec!["--state-out", text(&out)], "--state-out: expected another file than --out"),
        (vec!["--average-out", text(&out)], "--average-out: expected another file than --out"),
        (vec!["--state", "/no/such/state"], "/no/such/state: cannot open"),
    ] {
        refused_setting(&folder, &more, message);
    }
}

#[test]
fn flags_that_a_rule_does_not_have_are_refused() {
    let folder = Folder::new();
    for (more, message) in [
        (
            vec!["--nesterov"],
            "--nesterov: expected --optimizer momentum, found adamw, which has no such setting",
        ),
        (
            vec!["--optimizer", "sgd", "--eps", "0"],
            "--eps: expected --optimizer adamw or adam or adagrad or rmsprop or \
             schedule-free or lars or lamb or",
        ),
        (
            vec!["--optimizer", "momentum", "--dampening", "0.1", "--nesterov"],
            "dampening: expected 0 with nesterov, found 0.1",
        ),
    ] {
        refused_setting(&folder, &more, message);
    }
}

/// Runs `step` with these flags, which must be refused with `message` and leave what was there.
fn refused_setting(folder: &Folder, more: &[&str], message: &str) {
    let (params, grads) = folder.model();
    let out = folder.path("out");
    fs::write(&out, "precious").unwrap();
    let files = folder.files();
    let mut args = vec!["step", "--params", text(&params), "--grads", text(&grads)];
    args.extend(["--out", text(&out)]);
    args.extend(more);
    let error = refused(&args);
    assert!(error.contains(message), "{error}\nlacks {message}");
    assert_eq!(fs::read(&out).unwrap(), b"precious");
    assert_eq!(folder.files(), files);
}

/// Runs `step` on these files, which must be refused with `message` and write nothing.
fn refused_step(folder: &Folder, params: &Path, grads: &Path, message: &str) {
    let out = folder.path("out");
    let files = ["--params", text(params), "--grads", text(grads), "--out", text(&out)];
    let error = refused(&[&["step"], files.as_slice()].concat());
    assert!(error.contains(message), "{error}\nlacks {message}");
    assert!(!out.exists());
}

#[test]
fn damaged_and_missing_files_are_refused_and_nothing_is_written() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let good = fs::read(&params).unwrap();
    let mut long = u64::MAX.to_le_bytes().to_vec();
    long.extend_from_slice(&good[8..]);
    let (cut, long_header) = (folder.path("cut"), folder.path("long"));
    fs::write(&cut, &good[..good.len() - 3]).unwrap();
    fs::write(&long_header, &long).unwrap();
    for (bad, message) in [
        (&cut, "tensor data: expected"),
        (&long_header, "header: expected at most 100000000 bytes"),
        (&folder.path("missing"), "missing: cannot open"),
    ] {
        refused_step(&folder, bad, &grads, message);
        refused_step(&folder, &params, bad, message);
    }
    for out in ["/no/such/folder/out", text(&params.join("x")), "/"] {
        let files = ["--params", text(&params), "--grads", text(&grads), "--out", out];
        refused(&[&["step"], files.as_slice()].concat());
    }
    assert_eq!(fs::read(&params).unwrap(), good);
}

#[test]
fn gradients_that_do_not_fit_the_parameters_are_refused_by_name() {
    let folder = Folder::new();
    let (params, _) = folder.model();
    let all = |c: usize| {
        let a = ("a", vec![0.0; 17]);
        vec![a, ("b", vec![1.0]), ("empty", vec![]), ("c", vec![0.0; c])]
    };
    let mut extra = all(70_001);
    extra.push(("zzz", vec![0.0]));
    for (tensors, message) in [
        (
            all(70_001)[..3].to_vec(),
            "gradient of `c`: expected f32 [70001], found no tensor of this name",
        ),
        (extra, "gradient `zzz`: expected a parameter of this name"),
        (
            all(70_000),
            "gradient of `c`: expected f32 [70001] like the parameter, found f32 [70000]",
        ),
    ] {
        let grads = folder.path("grads");
        write(&grads, &tensors);
        refused_step(&folder, &params, &grads, message);
    }
}

#[test]
fn a_state_of_another_model_is_refused() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (small, state, out) = (folder.path("small"), folder.path("state"), folder.path("out"));
    write(&small, &[("a", vec![1.0; 17])]);
    ok(&[
        "step",
        "--params",
        text(&small),
        "--grads",
        text(&small),
        "--out",
        text(&out),
        "--state-out",
        text(&state),
    ]);
    let before = fs::read(&out).unwrap();
    let args = [
        "step",
        "--params",
        text(&params),
        "--grads",
        text(&grads),
        "--state",
        text(&state),
        "--out",
        text(&out),
    ];
    let error = refused(&args);
    assert!(error.contains("`b@moment1`: expected f32 [1], found no such tensor"), "{error}");
    assert_eq!(fs::read(&out).unwrap(), before);
}

#[test]
fn cuda_without_a_device_is_one_clear_error() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let out = folder.path("out");
    let args = [
        "step",
        "--params",
        text(&params),
        "--grads",
        text(&grads),
        "--out",
        text(&out),
        "--backend",
        "cuda",
    ];
    if cfg!(not(feature = "cuda")) {
        let error = refused(&args);
        assert!(error.starts_with("error: cuda: "), "{error}");
        assert!(!out.exists());
    }
}

#[test]
fn plan_reads_shapes_and_models_and_names_what_is_wrong() {
    let folder = Folder::new();
    let (params, _) = folder.model();
    let json: Value = serde_json::from_str(&ok(&["plan", text(&params), "--json"])).unwrap();
    assert_eq!(json["parameters"], 4);
    assert_eq!(json["elements"], 70_019);
    let page = folder.path("plan.html");
    let printed = ok(&["plan", text(&params), "--html", text(&page)]);
    assert!(printed.contains("4 parameters, 70,019 elements"));
    assert!(fs::read_to_string(&page).unwrap().contains("<svg"));
    let shapes = folder.path("shapes.json");
    for (content, message) in [
        (r#"[{"name":"a","shape":[2]},{"name":"a","shape":[3]}]"#, "`a`"),
        (r#"[{"name":"a","shape":[-2]}]"#, "expected [{\"name\""),
        (r#"[{"name":"a","shape":[4294967296,4294967296,2]}]"#, "`a`"),
        (r#"[{"name":"a","shape":[2],"dtype":"f33"}]"#, "`a`"),
        (r#"[{"name":"a","shape":[2],"dtype":"i32"}]"#, "`a`: expected f32, f64, f16 or bf16"),
        (
            r#"[{"name":"a","shape":[2],"dtype":"bool"}]"#,
            "`a`: expected f32, f64, f16 or bf16, found dtype `bool`",
        ),
        (r#"[["a",[4]]]"#, "invalid type: sequence, expected an object such as {\"name\""),
        (r#"[["a",[4],null]]"#, "invalid type: sequence, expected an object"),
        (r#"["a"]"#, "expected an object such as {\"name\": \"fc.weight\""),
        ("{", "expected [{\"name\""),
    ] {
        fs::write(&shapes, content).unwrap();
        let error = refused(&["plan", text(&shapes)]);
        assert!(error.contains(message), "{error}\nlacks {message}");
    }
}
