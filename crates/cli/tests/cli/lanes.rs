//! Runs with lanes: one hash at any number of ranks, however these share out a step.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{Folder, fusestep, ok, text};

/// Arguments of a short run with 12 lanes.
const TRAIN: [&str; 8] = ["train", "--epochs", "1", "--batch", "96", "--lanes", "12", "--json"];

/// Flags of a line.
pub(crate) fn words(flags: &str) -> Vec<&str> {
    flags.split_whitespace().collect()
}

/// Hash and loss of a short run.
fn trained(rule: &str, ranks: &str) -> (Value, Value) {
    let json = ok(&[&TRAIN[..], &words(rule), &words(ranks)].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    (json["params_hash"].clone(), json["final_loss"].clone())
}

/// Requires that all these ranks end as one does, and that ranks without lanes do not.
fn ends_alike(rule: &str, all: &[&str]) {
    let one = trained(rule, "");
    assert!(one.0.is_string() && one.1.is_number(), "{one:?}");
    for ranks in all {
        assert_eq!(trained(rule, ranks), one, "{rule} {ranks}");
    }
    let without = ["train", "--epochs", "1", "--batch", "96", "--json", "--ranks", "3"];
    let json: Value = serde_json::from_str(&ok(&[&without[..], &words(rule)].concat())).unwrap();
    assert!(json["params_hash"] != one.0, "{rule}: the order of sums decides nothing");
}

#[test]
fn a_model_learns_to_one_hash_on_any_number_of_ranks_at_any_stage() {
    ends_alike(
        "--optimizer adamw --clip-norm 1",
        &[
            "--ranks 1 --zero 3",
            "--ranks 2 --zero 1",
            "--ranks 3 --zero 2",
            "--ranks 4 --zero 3",
            "--ranks 5",
            "--ranks 5 --zero 2",
            // Ranks with other numbers of micro-batches gather parameters as often.
            "--ranks 5 --zero 3",
            "--ranks 6 --zero 3",
            "--ranks 12",
            "--ranks 12 --zero 1",
        ],
    );
}

#[test]
fn a_transformer_learns_to_one_hash_on_any_number_of_ranks() {
    ends_alike(
        "--model transformer --layers 1 --width 16 --context 8",
        &["--ranks 2 --zero 1", "--ranks 3", "--ranks 5 --zero 2", "--ranks 12 --zero 3"],
    );
}

#[test]
fn sixteen_bits_with_masters_and_norms_of_layers_end_alike_on_all_ranks() {
    ends_alike(
        "--optimizer lars --clip-norm 1 --dtype bf16 --master-weights f32",
        &["--ranks 2 --zero 3", "--ranks 3", "--ranks 4 --zero 2", "--ranks 5 --zero 1"],
    );
}

#[test]
fn lanes_of_several_micro_batches_end_alike_on_all_ranks() {
    ends_alike(
        "--accumulate 2",
        &["--ranks 2 --zero 2", "--ranks 3 --zero 3", "--ranks 5 --zero 3", "--ranks 12"],
    );
}

#[test]
#[cfg(target_os = "linux")]
fn processes_end_as_threads_do() {
    ends_alike(
        "--clip-norm 1",
        &["--ranks 3 --zero 2 --engine processes", "--ranks 4 --engine processes"],
    );
}

#[test]
fn an_epoch_of_lanes_has_no_rest_to_tell_of() {
    let output = fusestep(&[&TRAIN[..], &["--accumulate", "2", "-v"]].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && !said.contains("the last update"), "{said}");
    // 1,440 samples of 12 lanes of two micro-batches of 96 samples.
    assert!(said.contains("8 batches of 192 an epoch"), "{said}");
}

/// Waits until a run has saved something else than `before`; returns whether it still runs then.
fn saves(run: &mut Child, manifest: &Path, before: &[u8]) -> bool {
    let begun = Instant::now();
    while run.try_wait().unwrap().is_none() {
        if fs::read(manifest).is_ok_and(|now| now != before) {
            return true;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no save within a minute");
        std::thread::sleep(Duration::from_micros(100));
    }
    false
}

#[test]
fn a_run_stopped_between_updates_goes_on_at_fewer_ranks_to_the_same_hash() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let manifest = path.join("manifest.json");
    let base = words("train --epochs 3 --batch 96 --lanes 12 --zero 2 --clip-norm 1 --json");
    let hash = |text: &str| serde_json::from_str::<Value>(text).unwrap()["params_hash"].clone();
    let whole = hash(&ok(&[&base[..], &["--ranks", "2"]].concat()));
    let saving = [&base[..], &["--save-every", "1", "--checkpoint", text(&path)]].concat();
    let stopped = |more: &[&str]| {
        let before = fs::read(&manifest).unwrap_or_default();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.env("FUSESTEP_FIGURES", "none").args(&saving).args(more);
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let is_stopped = saves(&mut run, &manifest, &before);
        // SIGKILL: the save is the last that there is of the run.
        run.kill().unwrap();
        run.wait().unwrap();
        is_stopped
    };
    // A run may end before it is stopped, if this machine has much else to do.
    let are_stopped = (0..5).any(|_| {
        let _ = fs::remove_dir_all(&path);
        stopped(&["--ranks", "4"]) && stopped(&["--ranks", "3", "--resume"])
    });
    assert!(are_stopped, "every run has ended before it could be stopped");
    let ended = ok(&[&saving[..], &["--ranks", "1", "--resume"]].concat());
    let json: Value = serde_json::from_str(&ended).unwrap();
    assert!(json["steps"].as_u64().unwrap() < 45, "{json}");
    assert_eq!(json["params_hash"], whole);
}
