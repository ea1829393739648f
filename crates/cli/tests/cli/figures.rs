//! Figures that `check` keeps and other commands choose from.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use super::{Folder, Value, text};

/// Runs the command with a cache folder of its own.
fn with_cache(cache: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
    command.env_remove("FUSESTEP_FIGURES").env("XDG_CACHE_HOME", cache);
    command.args(args).output().unwrap()
}

fn told(cache: &Path, args: &[&str]) -> String {
    let output = with_cache(cache, args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// A model of 120 MiB, and figures of slow calls.
fn model_and_figures(folder: &Folder) -> (String, String) {
    let (model, slow) = (folder.path("model.json"), folder.path("slow.json"));
    let tensors: Vec<String> =
        (0..30).map(|index| format!("\"layer{index}\": [1024, 1024]")).collect();
    fs::write(&model, format!("{{{}}}", tensors.join(", "))).unwrap();
    let link = r#"{"alpha_seconds": 0.01, "beta_bytes_per_second": 5e9}"#;
    let world = |engine: &str, shares: bool| {
        format!(
            r#"{{"engine": "{engine}", "ranks": 2, "shares_memory": {shares},
            "measured": "2026-11-29", "costs": {{"all_reduce": {link}, "reduce_scatter": {link},
            "all_gather": {link}, "memory_bytes_per_second": 1e10,
            "fresh_bytes_per_second": 2e9}}}}"#
        )
    };
    let worlds = [world("thread", true), world("mpi", false)].join(", ");
    let version = env!("CARGO_PKG_VERSION");
    let content = format!(
        r#"{{"format": 1, "version": "{version}", "measured": "2026-11-29", "processor": "any",
        "processors": 2, "worlds": [{worlds}], "threads": []}}"#
    );
    fs::write(&slow, content).unwrap();
    (text(&model).to_owned(), text(&slow).to_owned())
}

#[test]
fn check_keeps_figures_and_plan_reads_them() {
    let folder = Folder::new();
    let (model, _) = model_and_figures(&folder);
    let cache = folder.path("cache");
    let plan = ["plan", &model, "--world", "2", "--engine", "processes"];
    let unknown = told(&cache, &plan);
    let expected = "buckets of the default size: no figures of this machine are known; `fusestep \
                    check` measures them";
    assert!(unknown.contains(expected), "{unknown}");
    let file = cache.join("fusestep").join("figures.json");
    let checked = told(&cache, &["check"]);
    let line = checked.lines().find(|line| line.starts_with("figures ")).unwrap();
    assert!(line.contains("yes") && line.contains(text(&file)), "{line}");
    let kept: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(kept["worlds"][0]["engine"], "thread");
    assert!(kept["threads"][0]["bytes_per_second"].as_f64().unwrap() > 0.0);
    let known = told(&cache, &plan);
    assert!(known.contains("note figures "), "{known}");
    assert!(known.contains("figures of 2 ranks, engine thread, measured 2"), "{known}");
    assert!(!known.contains("would cost least"), "{known}");
    // Ranks of no engine are met with the engine whose figures are there.
    let unnamed = told(&cache, &plan[..4]);
    let said = "by calls are known, only those of engine thread, for `fusestep plan --engine \
                thread`; `fusestep check --engine` measures them where such ranks run";
    assert!(unnamed.contains(said), "{unnamed}");
    // A cap that is given is nobody's choice.
    let given = told(&cache, &[&plan[..], &["--bucket-cap-mib", "25"]].concat());
    assert!(!given.contains("buckets of 25 MiB stay"), "{given}");
    let checked = told(&cache, &["check", "--engine", "thread", "--ranks", "3"]);
    assert!(checked.contains("figures: "), "{checked}");
    let kept: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let ranks: Vec<u64> =
        kept["worlds"].as_array().unwrap().iter().map(|of| of["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [2, 3]);
    for (content, word) in [("{", "found no JSON"), (r#"{"format":9,"version":"0"}"#, "format 9")] {
        fs::write(&file, content).unwrap();
        let found = told(&cache, &plan);
        assert!(found.contains(word) && found.contains("buckets of the default size"), "{found}");
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_told_in_a_line() {
    let folder = Folder::new();
    let cache = folder.path("file");
    fs::write(&cache, "").unwrap();
    let checked = told(&cache, &["check"]);
    let line = checked.lines().find(|line| line.starts_with("figures ")).unwrap();
    assert!(line.contains("no   figures are not kept: "), "{checked}");
}

#[test]
fn runs_with_figures_have_the_bits_of_runs_without() {
    let folder = Folder::new();
    let (model, slow) = model_and_figures(&folder);
    let cache = folder.path("cache");
    let plan = ["plan", &model, "--world", "2"];
    let caps = told(&cache, &[&plan[..], &["--figures", &slow]].concat());
    assert!(caps.contains("MiB in place of 25: a step of "), "{caps}");
    let off = told(&cache, &[&plan[..], &["--figures", "none"]].concat());
    assert!(!off.contains("note figures"), "{off}");
    let train = |more: &[&str]| -> Value {
        let args = ["train", "--epochs", "1", "--json", "--ranks", "2"];
        serde_json::from_str(&told(&cache, &[&args[..], more].concat())).unwrap()
    };
    for engine in ["thread", "processes"] {
        let plain = train(&["--engine", engine]);
        let chosen = train(&["--engine", engine, "--figures", &slow]);
        assert!(plain["params_hash"].is_string(), "{plain}");
        assert_eq!(chosen["params_hash"], plain["params_hash"], "{engine}");
    }
    let output = with_cache(&cache, &[&plan[..], &["--figures", "missing.json"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("--figures missing.json: expected a file that"), "{error}");
}
