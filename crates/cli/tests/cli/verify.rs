//! Steps of a user's own shapes, compared over numbers of ranks, stages and engines.

use std::fs;

use serde_json::Value;

use crate::lanes::words;
use crate::{Folder, fusestep, ok, refused, text};

/// A model of tensors that no number of ranks divides.
const SHAPES: &str = r#"{"a.weight": [37, 11], "a.bias": [11], "b": [1501], "s": [1], "e": [0]}"#;

/// What `verify --json` prints of the shapes of these tests.
fn verified(flags: &str) -> Value {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, SHAPES).unwrap();
    let args = [&["verify", text(&shapes), "--json"][..], &words(flags)].concat();
    serde_json::from_str(&ok(&args)).unwrap()
}

#[test]
fn steps_of_a_users_shapes_end_in_one_hash_on_every_world_and_stage() {
    for flags in [
        "--clip-norm 1",
        "--clip-norm 1 --dtype bf16 --master-weights f32",
        "--optimizer lars --accumulate 2 --steps 2",
        "--update-in-backward --seed 7",
    ] {
        let found = verified(&format!("--lanes 6 --worlds 1,2,3,4,5 {flags}"));
        let runs = found["runs"].as_array().unwrap();
        let stages = if flags.starts_with("--update") { 3 } else { 4 };
        assert_eq!(runs.len(), 5 * stages, "{found}");
        for run in runs {
            assert_eq!(run["params_hash"], found["params_hash"], "{flags}: {run}");
            // As many micro-batches on each rank as on the others: 6 or 12 of them on 4 and 5.
            let divides = match run["world"].as_u64().unwrap() {
                4 => flags.contains("--accumulate"),
                world => world != 5,
            };
            assert_eq!(run["times_rank_order"].is_number(), divides, "{run}");
            assert!(run["ns_per_step"].as_f64().unwrap() > 0.0, "{run}");
        }
        // The gradients are such that the order of sums shows.
        assert!(found["rank_order_hashes"].as_u64().unwrap() > 1, "{found}");
        assert!(runs[0]["peak_sums"].as_u64() > runs.last().unwrap()["peak_sums"].as_u64());
    }
    let hash = |flags: &str| verified(flags)["params_hash"].clone();
    let usual = hash("--lanes 6 --worlds 1 --zero 0");
    for other in ["--lanes 7", "--lanes 6 --seed 2", "--lanes 6 --steps 2", "--lanes 6 --lr 0.1"] {
        assert!(hash(&format!("{other} --worlds 1 --zero 0")) != usual, "{other}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn steps_between_processes_end_as_those_between_threads() {
    let flags = "--lanes 4 --worlds 1,3 --zero 0,2 --engine thread,processes";
    let found = verified(flags);
    let runs = found["runs"].as_array().unwrap().iter();
    let engines: Vec<&str> = runs.map(|run| run["engine"].as_str().unwrap()).collect();
    let expected = [["thread"; 4], ["processes"; 4]].concat();
    assert_eq!(engines, expected);
    assert!(found["params_hash"].is_string(), "{found}");
}

#[test]
fn a_table_names_each_run_and_ends_in_one_hash_or_an_error_with_both() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, SHAPES).unwrap();
    let base = ["verify", text(&shapes), "--lanes", "4", "--worlds", "1,2", "--zero", "0,3"];
    let printed = ok(&base);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 7, "{printed}");
    let head = "adamw on 5 parameters, 1,920 elements of f32: 3 steps of 4 micro-batches in 4 \
                lanes, seed 1";
    assert_eq!(lines[0], head);
    let hash = lines[2].split_whitespace().nth(3).unwrap();
    for (line, run) in lines[2..6].iter().zip(["1 0 ", "1 3 ", "2 0 ", "2 3 "]) {
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert!(cells.join(" ").starts_with(&format!("{run}thread {hash} ")), "{line}");
    }
    let end = format!("one hash: 4 runs end in xxh3 {hash}; in rank order 4 runs end in 2 hashes");
    assert_eq!(lines[6], end);
    assert_eq!(ok(&[&base[..], &["--expect", hash]].concat()).lines().last(), Some(&*end));
    let wrong = "0123456789abcdef";
    for json in [&[][..], &["--json"]] {
        let error = refused(&[&base[..], &["--expect", wrong], json].concat());
        let named = format!(
            "error: world 1, zero stage 0, engine thread: expected the parameters xxh3 {wrong} of \
             --expect, found xxh3 {hash}; "
        );
        assert!(error.starts_with(&named), "{error}");
    }
}

#[test]
fn worlds_and_stages_that_cannot_be_compared_are_refused_with_what_works() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, SHAPES).unwrap();
    for (flags, message) in [
        ("", "--lanes: expected a number of lanes, found no such flag; give one of at least"),
        (
            "--lanes 4 --worlds 1,6",
            "--worlds: expected at most 4 ranks, one for each of --lanes, found 6; leave 6 out, or \
             give --lanes 6 or more",
        ),
        ("--lanes 4 --worlds 0", "expected a number from 1 to 1024"),
        ("--lanes 4 --worlds 2,1,2", "--worlds: expected each number of ranks once, found 2 twice"),
        ("--lanes 4 --zero 1,1", "--zero: expected each stage once, found 1 twice; leave one out"),
        ("--lanes 4 --zero 4", "expected a number from 0 to 3"),
        ("--lanes 4 --engine thread,thread", "--engine: expected each engine once, found thread"),
        ("--lanes 4 --expect 12", "expected the 16 hexadecimal digits of a run's hash"),
        ("--lanes 4 --update-in-backward --zero 3", "--zero 3: --update-in-backward and --zero: "),
        ("--lanes 4 --separate --naive", "--separate and --naive: "),
        ("--lanes 4 --master-weights f32", "master"),
    ] {
        let error = refused(&[&["verify", text(&shapes)], &words(flags)[..]].concat());
        assert!(error.contains(message), "{flags}: {error}");
    }
    let kept = ["verify", text(&shapes), "--lanes", "2", "--update-in-backward"];
    let said = String::from_utf8(fusestep(&kept).stderr).unwrap();
    assert!(said.starts_with("note: --zero 3 is left out: --update-in-backward and --zero: "));
    fs::write(&shapes, "[]").unwrap();
    let error = refused(&["verify", text(&shapes), "--lanes", "2"]);
    assert!(error.contains("expected a parameter"), "{error}");
}
