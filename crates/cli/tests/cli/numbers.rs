//! Numbers that different subcommands tell of one thing.

use std::fs;

use serde_json::Value;

use crate::{Folder, ok, refused, text};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

#[test]
fn plans_steps_runs_and_timings_count_the_same_launches() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let out = folder.path("out");
    let files = ["--params", text(&params), "--grads", text(&grads)];
    let step = [&["step", "--json"], &files[..], &["--out", text(&out)]].concat();
    for passes in [
        &[][..],
        &["--clip-norm", "1"],
        &["--update-norms"],
        &["--update-norms", "--loss-scale", "dynamic"],
        &["--optimizer", "lamb", "--clip-norm", "1"],
        &["--table", "resident"],
    ] {
        let naive = [passes, &["--naive"]].concat();
        let of_plan =
            |passes: &[&str]| json(&[&["plan", text(&params), "--json"][..], passes].concat());
        let (fused, separate) = (of_plan(passes), of_plan(&naive));
        assert_eq!(separate["launches"], separate["naive_launches"], "{passes:?}");
        assert_eq!(fused["naive_launches"], separate["launches"], "{passes:?}");
        let of_step = |passes: &[&str]| json(&[&step[..], passes].concat())["launches"].clone();
        assert_eq!(of_step(passes), fused["host_launches"], "{passes:?}");
        assert_eq!(of_step(&naive), separate["host_launches"], "{passes:?}");
        let bench = ["bench", text(&params), "--rounds", "1", "--json"];
        let bench = json(&[&bench[..], passes].concat());
        assert_eq!(bench["launches"], fused["host_launches"], "{passes:?}");
        assert_eq!(bench["naive_launches"], separate["host_launches"], "{passes:?}");
    }
    // Of the model's own parameters, of which all go into one launch.
    let train = ["train", "--epochs", "1", "--json", "--update-norms"];
    assert_eq!(json(&train)["launches_per_step"], 1);
    let printed = ok(&["plan", text(&params), "--update-norms"]);
    assert!(
        printed.contains("2 launches per step")
            && printed.contains("cpu has none and 1 launch per"),
        "{printed}"
    );
}

#[test]
fn no_steps_have_no_launches_and_take_no_time() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let out = folder.path("out");
    let files = ["--params", text(&params), "--grads", text(&grads)];
    let step = [&["step"], &files[..], &["--out", text(&out), "--steps", "0"]].concat();
    let printed = ok(&step);
    assert!(printed.contains("0 adamw steps") && !printed.contains("per step"), "{printed}");
    let json = json(&[&step[..], &["--json"]].concat());
    assert_eq!((&json["launches"], &json["ns_per_step"]), (&0.into(), &Value::Null));
}

#[test]
fn what_is_one_is_told_in_the_singular() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let out = folder.path("out");
    let files = ["--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let printed = ok(&[&["step"], &files[..], &["--steps", "1", "--clip-norm", "1"]].concat());
    assert!(printed.contains("1 adamw step on cpu ("), "{printed}");
    assert!(printed.contains("; 0 steps skipped\n"), "{printed}");
    let printed = ok(&["bench", text(&params), "--threads", "1", "--rounds", "1"]);
    assert!(printed.contains("; 1 thread, "), "{printed}");
}

#[test]
fn every_file_that_a_step_writes_is_named() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [out, state, average] = ["out", "state", "average"].map(|name| folder.path(name));
    let files = ["--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let more = ["--state-out", text(&state), "--average-out", text(&average)];
    let rule = ["--optimizer", "schedule-free"];
    let printed = ok(&[&["step"], &files[..], &more, &rule].concat());
    let (out, state, average) = (text(&out), text(&state), text(&average));
    let named = format!("wrote {out}, {state}, {average}\n");
    assert!(printed.contains(&named), "{printed}");
}

#[test]
fn bench_says_the_dtypes_of_the_model_and_refuses_steps_that_its_peers_do_not_make() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    let both = r#"[{"name":"a","shape":[9],"dtype":"f64"},{"name":"b","shape":[7]}]"#;
    for (model, dtypes) in [(both, "f32 and f64"), (&both.replace("f64", "bf16"), "bf16 and f32")] {
        fs::write(&shapes, model).unwrap();
        for ranks in [&[][..], &["--ranks", "2"]] {
            let bench = ["bench", text(&shapes), "--rounds", "1", "--json"];
            let json = ok(&[&bench[..], ranks].concat());
            let json: Value = serde_json::from_str(&json).unwrap();
            assert_eq!(json["dtype"], dtypes, "{json}");
        }
    }
    for peers in [&["--peer", "candle"][..], &["--peers"]] {
        for asked in [&["--amsgrad"][..], &["--maximize"], &["--clip-norm", "1"]] {
            let error = refused(&[&["bench", text(&shapes)], peers, asked].concat());
            let expected = format!("expected a plain step, found {}", asked[0]);
            assert!(error.contains(&expected), "{error}");
        }
    }
}

/// `FUSESTEP_BLESS=1 cargo test --release -p fusestep-cli --test cli pictures` draws it anew.
#[test]
fn pictures_of_plans_are_what_the_readme_s_command_draws() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let (shapes, kept) =
        (format!("{root}/data/shapes/resnet50.json"), format!("{root}/docs/pictures/plan.svg"));
    let folder = Folder::new();
    let drawn = folder.path("plan.svg");
    ok(&["plan", &shapes, "--world", "4", "--zero", "2", "--svg", text(&drawn)]);
    if std::env::var_os("FUSESTEP_BLESS").is_some() {
        std::fs::copy(&drawn, &kept).unwrap();
    }
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    assert!(read(&drawn) == read(kept.as_ref()), "{kept} is stale");
}
