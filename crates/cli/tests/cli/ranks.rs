//! Training on many ranks and their plans, as a user sees them.

use std::fs;

use serde_json::Value;

use crate::{Folder, ok, refused, text};

pub(crate) fn train(more: &[&str]) -> Value {
    let mut args = vec!["train", "--json", "--epochs", "2"];
    args.extend(more);
    serde_json::from_str(&ok(&args)).unwrap()
}

#[test]
fn four_ranks_train_to_the_same_bits_however_they_share_the_work() {
    for rule in ["adamw", "momentum", "lars"] {
        let base = ["--ranks", "4", "--clip-norm", "1", "--optimizer", rule];
        let run = |more: &[&str]| train(&[&base, more].concat());
        let whole = run(&[]);
        assert_eq!(
            (&whole["ranks"], &whole["zero"], &whole["engine"]),
            (&4.into(), &0.into(), &"thread".into())
        );
        let ways: [&[&str]; 8] = [
            &["--naive"],
            &["--apart"],
            &["--zero", "1", "--bucket-cap-mib", "0.01", "--comm-streams", "0"],
            &["--zero", "2", "--comm-streams", "3", "--bucket-cap-mib", "0.02"],
            // The old name of the flag.
            &["--zero", "3", "--rings", "1"],
            &["--zero", "3", "--naive"],
            &["--zero", "2", "--threads", "1"],
            &["--zero", "1", "--apart"],
        ];
        for way in ways {
            let found = run(way);
            assert_eq!(found["params_hash"], whole["params_hash"], "{rule} {way:?}");
            assert_eq!(found["final_loss"], whole["final_loss"], "{rule} {way:?}");
        }
    }
}

#[test]
fn a_bucket_reduced_and_updated_in_one_pass_ends_with_the_same_bits() {
    for zero in ["0", "1"] {
        for rule in ["adamw", "momentum", "lion", "rmsprop"] {
            let base = ["--ranks", "3", "--zero", zero, "--optimizer", rule];
            let (one_pass, separate) = (train(&base), train(&[&base[..], &["--apart"]].concat()));
            assert_eq!(one_pass["params_hash"], separate["params_hash"], "{rule} {zero}");
        }
    }
    let printed = ok(&["train", "--ranks", "2", "--epochs", "1"]);
    assert!(printed.contains("reduced and updated in one pass"), "{printed}");
}

#[test]
fn updates_in_backward_train_to_the_bits_of_updates_in_the_step() {
    let ways: [&[&str]; 7] = [
        &[],
        &["--accumulate", "3"],
        &["--ranks", "3"],
        // 3 ranks have 29 batches of 64 and one of 60 or less, of which ranks have uneven parts.
        &["--ranks", "3", "--zero", "1", "--bucket-cap-mib", "0.01"],
        &["--ranks", "2", "--zero", "2", "--comm-streams", "2"],
        &["--ranks", "2", "--apart", "--accumulate", "2"],
        &["--ranks", "2", "--local-sgd", "4"],
    ];
    for way in ways {
        let (plain, found) = (train(way), train(&[way, &["--update-in-backward"]].concat()));
        for key in ["params_hash", "final_loss", "history"] {
            assert_eq!(found[key], plain[key], "{key} {way:?}");
        }
    }
    let printed = ok(&["train", "--ranks", "2", "--epochs", "1", "--update-in-backward"]);
    assert!(
        printed.contains("note update_in_backward applied: ")
            && printed.contains("no longer read then"),
        "{printed}"
    );
    let both = ["train", "--clip-norm", "1", "--update-in-backward"];
    let found = refused(&both);
    assert!(found.contains("--update-in-backward and --clip-norm"), "{found}");
}

#[test]
fn shard_groups_train_to_the_same_bits_at_every_stage() {
    let base = ["--ranks", "4", "--shard-group", "2", "--clip-norm", "1"];
    let run = |more: &[&str]| train(&[&base, more].concat());
    let whole = run(&["--zero", "1"]);
    for way in
        [&["--zero", "2", "--comm-streams", "0"][..], &["--zero", "3", "--bucket-cap-mib", "0.01"]]
    {
        assert_eq!(run(way)["params_hash"], whole["params_hash"], "{way:?}");
    }
    let all = train(&["--ranks", "4", "--zero", "1"]);
    let bytes = |run: &Value| run["state_bytes_per_rank"].as_u64().unwrap();
    assert!(bytes(&whole) > bytes(&all) * 3 / 2, "a group's part, not the world's");
    let error = refused(&["train", "--ranks", "4", "--shard-group", "3", "--zero", "2"]);
    assert!(error.contains("multiple of a shard group's 3 ranks"), "{error}");
    let error = refused(&["train", "--ranks", "4", "--shard-group", "2"]);
    assert!(error.contains("--zero"), "{error}");
}

#[test]
fn how_long_ranks_wait_is_checked_and_changes_no_bits() {
    let base = ["--ranks", "2", "--epochs", "1"];
    let folder = Folder::new();
    let recorder = folder.path("recorder");
    let watched = ["--timeout", "2.5", "--flight-recorder", text(&recorder)];
    let plain = ok(&[&["train", "--json"], &base[..]].concat());
    let found = ok(&[&["train", "--json"], &base[..], &watched].concat());
    let hash = |text: &str| serde_json::from_str::<Value>(text).unwrap()["params_hash"].clone();
    assert_eq!(hash(&found), hash(&plain));
    assert!(!recorder.exists(), "nothing went wrong");
    for timeout in ["0", "-1", "NaN", "inf", "86401", "soon"] {
        let error = refused(&["train", "--ranks", "2", &format!("--timeout={timeout}")]);
        assert!(error.contains("expected seconds above 0, 86400 at most"), "{timeout}: {error}");
    }
    for (command, expected) in [("check", "--engine"), ("train", "--ranks")] {
        let error = refused(&[command, "--timeout", "1"]);
        assert!(error.contains("--timeout") && error.contains(expected), "{error}");
    }
}

#[test]
fn ranks_without_images_take_part() {
    // 1,437 images in batches of 9 end with a batch of 6, which leaves one of 7 ranks without.
    let base = ["--ranks", "7", "--batch", "9", "--epochs", "1", "--clip-norm", "1"];
    let hash = |more: &[&str]| {
        let found = ok(&[&["train", "--json"], &base[..], more].concat());
        serde_json::from_str::<Value>(&found).unwrap()["params_hash"].clone()
    };
    let whole = hash(&[]);
    assert_eq!(hash(&["--zero", "3", "--comm-streams", "1"]), whole);
    assert_eq!(hash(&["--zero", "2", "--naive"]), whole);
}

#[test]
fn state_and_parameters_shrink_as_the_stage_promises() {
    let number = |run: &Value, key: &str| run[key].as_u64().unwrap();
    let (whole, shared) = (train(&["--ranks", "4"]), train(&["--ranks", "4", "--zero", "1"]));
    let (all, part) =
        (number(&whole, "state_bytes_per_rank"), number(&shared, "state_bytes_per_rank"));
    assert!(part < all / 4 + 6 * 512, "{part} of {all}");
    let third = train(&["--ranks", "4", "--zero", "3", "--comm-streams", "0"]);
    let (peak, parameters) =
        (number(&third, "layer_peak_bytes"), number(&third, "parameter_bytes"));
    assert_eq!(peak, parameters, "whole while the model uses them, and once");
    let streams = train(&["--ranks", "4", "--zero", "3", "--comm-streams", "2"]);
    assert_eq!(streams["params_hash"], third["params_hash"]);
    assert_eq!(streams["collectives_per_step"], third["collectives_per_step"]);
}

#[test]
fn one_rank_is_a_world_like_any_other() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let alone = train(&[]);
    assert_eq!(alone["params_hash"], train(&["--ranks", "1"])["params_hash"]);
    assert_eq!(alone["collectives_per_step"], 0.0);
    let saved = train(&["--checkpoint", text(&path)]);
    assert_eq!(saved["params_hash"], alone["params_hash"]);
    assert!(saved["candle_ns_per_step"].as_f64().unwrap() > 0.0);
    // Nothing is left to do: the run reports the model that was saved.
    let ended = train(&["--checkpoint", text(&path), "--resume"]);
    for key in ["params_hash", "final_loss", "test_accuracy"] {
        assert_eq!(ended[key], saved[key], "{key}");
    }
    assert_eq!(ended["steps"], 0);
    let page = folder.path("report.html");
    ok(&["train", "--epochs", "1", "--ranks", "2", "--report", text(&page)]);
    let page = fs::read_to_string(&page).unwrap();
    assert!(page.contains("<polyline") && page.contains("Buckets between 2 ranks"));
}

#[test]
fn added_batches_train_as_larger_ones_and_adding_one_changes_nothing() {
    let momentum = ["--optimizer", "momentum", "--ranks", "1"];
    let run = |more: &[&str]| train(&[&momentum, more].concat());
    let (added, large) = (run(&["--batch", "16", "--accumulate", "4"]), run(&["--batch", "64"]));
    assert_eq!(added["steps"], large["steps"]);
    let loss = |run: &Value| run["final_loss"].as_f64().unwrap();
    assert!((loss(&added) - loss(&large)).abs() < 1e-6, "{added} {large}");
    let plain = train(&["--ranks", "2"]);
    let one = train(&["--ranks", "2", "--gradient-merge", "1"]);
    assert_eq!(plain["params_hash"], one["params_hash"]);
    let each = ["--ranks", "3", "--accumulate", "3", "--reduce-each", "--dtype", "bf16"];
    let hash = |more: &[&str]| train(&[&each, more].concat())["params_hash"].clone();
    assert_eq!(hash(&["--zero", "2", "--comm-streams", "0"]), hash(&[]));
    // The sum is in another order, if there are ranks to sum over.
    for (ranks, same) in [("1", true), ("3", false)] {
        let base = ["--ranks", ranks, "--accumulate", "3"];
        let (end, every) = (train(&base), train(&[&base[..], &["--reduce-each"]].concat()));
        assert_eq!(end["params_hash"] == every["params_hash"], same, "{ranks}");
    }
    let adaptive = train(&["--ranks", "2", "--local-sgd", "1", "--adaptive"]);
    assert!(adaptive["test_accuracy"].as_f64().unwrap() > 0.5);
    let local = train(&["--ranks", "2", "--local-sgd", "4"]);
    assert!(local["test_accuracy"].as_f64().unwrap() > 0.5);
    let error = refused(&["train", "--ranks", "2", "--zero", "2", "--local-sgd", "2"]);
    assert!(error.contains("--local-sgd and --zero"), "{error}");
}

#[test]
fn plans_tell_gathers_of_layers_from_other_calls() {
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/shapes/resnet50.json");
    let plan = |zero: &str, more: &[&str]| -> Value {
        let args = ["plan", shapes, "--json", "--world", "8", "--zero", zero];
        serde_json::from_str(&ok(&[&args[..], more].concat())).unwrap()
    };
    assert_eq!(plan("2", &[])["layer_gathers"], 0);
    // Every bucket is reduced once; a program asks for each of 107 layers with parameters twice in
    // every micro-step.
    for (more, micro_steps) in [(&[][..], 1), (&["--accumulate", "3"], 3)] {
        let third = plan("3", more);
        let [calls, buckets, layers] =
            ["collectives", "buckets", "layer_gathers"].map(|key| third[key].as_u64().unwrap());
        let expected = (buckets + layers, 2 * 107 * micro_steps);
        assert_eq!((calls, layers), expected);
    }
}

#[test]
fn plans_know_which_engines_ranks_see_each_others_memory() {
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/shapes/resnet50.json");
    for zero in ["0", "1"] {
        let plan = |more: &[&str]| {
            let args = ["plan", shapes, "--world", "4", "--zero", zero];
            ok(&[&args[..], more].concat())
        };
        for engine in ["thread", "processes"] {
            let fused = plan(&["--engine", engine]);
            assert!(!fused.contains("predicted: 0.00 ms"), "{fused}");
            assert!(fused.contains("reduced and updated in one pass"), "{fused}");
            let separate = plan(&["--engine", engine, "--apart"]);
            assert!(!separate.contains("in one pass"), "{separate}");
        }
        assert!(!plan(&["--engine", "mpi"]).contains("in one pass"));
    }
    let error = refused(&["plan", shapes, "--engine", "thread"]);
    assert!(error.contains("--world"), "{error}");
}

#[test]
fn plans_of_many_ranks_count_their_calls() {
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/shapes/resnet50.json");
    let run = |more: &[&str]| -> Value {
        serde_json::from_str(&ok(&[&["plan", shapes, "--json"], more].concat())).unwrap()
    };
    let plan = run(&["--world", "8", "--zero", "2", "--bucket-cap-mib", "25"]);
    let number = |key: &str| plan[key].as_u64().unwrap();
    // 97.5 MiB of gradients in buckets of 25, each reduced by one call and gathered by another.
    assert_eq!((number("collectives"), number("naive_collectives")), (10, 322));
    let bytes = 25_557_032 * 4;
    assert!(number("bytes_on_wire").abs_diff(2 * bytes * 7 / 8) < 1_000);
    assert!(number("state_bytes_per_rank").abs_diff(2 * bytes / 8) < 200_000);
    assert!(plan["predicted_step_ns"].as_f64().unwrap() > 0.0);
    let (worst, mean) = (&plan["worst_rank"], &plan["mean_rank"]);
    for key in ["state_bytes", "memory_bytes", "bytes_sent"] {
        let (worst, mean) = (worst[key].as_u64().unwrap(), mean[key].as_u64().unwrap());
        assert!(mean > 0 && mean <= worst && worst < mean * 11 / 10, "{key}");
    }
    let naive = run(&["--world", "8", "--naive"]);
    assert_eq!(naive["collectives"], naive["naive_collectives"]);
    let hidden = run(&["--world", "8", "--backward-ms", "100"]);
    let after = run(&["--world", "8", "--backward-ms", "100", "--comm-streams", "0"]);
    let exposed = |plan: &Value| plan["exposed_ns"].as_f64().unwrap();
    assert!(exposed(&hidden) < exposed(&after));
    assert!(hidden["proposed_bucket_cap_bytes"].as_u64().unwrap() > 0);
    let given = ["--world", "2", "--memory-gbs", "10", "--gather-gbs", "5"];
    let given = run(&given);
    let number = |key: &str| given[key].as_f64().unwrap();
    assert!(number("local_ns") > 0.0 && number("predicted_step_ns") > number("local_ns"));
    let measured = run(&["--world", "2", "--measure"]);
    assert!(measured["local_ns"].as_f64().unwrap() > 0.0);
    assert!(measured["predicted_step_ns"].as_f64().unwrap() > 0.0);
    let folder = Folder::new();
    let page = folder.path("plan.html");
    ok(&["plan", shapes, "--world", "4", "--zero", "2", "--html", text(&page)]);
    assert!(fs::read_to_string(&page).unwrap().contains("<h2>Timeline</h2>"));
    let error = refused(&["plan", shapes, "--world", "2", "--latency-us", "0"]);
    assert!(error.contains("--latency-us"), "{error}");
    let error = refused(&["plan", shapes, "--world", "2", "--bucket-cap-mib", "0"]);
    assert!(error.contains("--bucket-cap-mib"), "{error}");
}

#[test]
fn parameters_are_compared_every_so_many_batches_and_change_nothing_by_it() {
    let plain = train(&["--ranks", "2", "--zero", "1"]);
    for every in ["1", "7"] {
        let compared = train(&["--ranks", "2", "--zero", "1", "--compare-parameters", every]);
        assert_eq!(compared["params_hash"], plain["params_hash"]);
    }
    let sharded = ["train", "--ranks", "2", "--zero", "3"];
    let error = refused(&[&sharded[..], &["--compare-parameters", "1"]].concat());
    assert!(error.contains("--zero 3"), "{error}");
    let error = refused(&["train", "--compare-parameters", "1"]);
    assert!(error.contains("--ranks"), "{error}");
}

#[test]
fn updates_at_an_epochs_end_count_with_what_they_send() {
    let run = |more: &[&str]| {
        let base = ["train", "--json", "--epochs", "1", "--ranks", "2"];
        serde_json::from_str::<Value>(&ok(&[&base[..], more].concat())).unwrap()
    };
    let number = |run: &Value, key: &str| run[key].as_f64().unwrap();
    let every = run(&[]);
    // 45 batches: the last update is that of what is left.
    for (accumulate, updates) in [("2", 23), ("100", 1)] {
        let added = run(&["--accumulate", accumulate]);
        assert_eq!(added["steps"], updates);
        for key in ["collectives_per_step", "bytes_sent_per_step"] {
            assert_eq!(number(&added, key), number(&every, key), "{key} {accumulate}");
        }
        assert!(number(&added, "optimizer_ns_per_step") > 0.0);
    }
    // One average at the end, and one for each batch before it.
    let (one, all) = (run(&["--local-sgd", "100"]), run(&["--local-sgd", "1"]));
    let sent = |run: &Value| number(run, "bytes_sent_per_step") * number(run, "steps");
    assert!(sent(&one) > 0.0 && sent(&all) == 46.0 * sent(&one), "{one} {all}");
}

#[test]
#[cfg(unix)]
fn ranks_that_would_make_other_calls_hear_of_the_flag_before_the_first_step() {
    let program = env!("CARGO_BIN_EXE_fusestep");
    let folder = Folder::new();
    let checkpoint = format!("--checkpoint {}", text(&folder.path("checkpoint")));
    for (first, second, named) in [
        (&*checkpoint, "", "--checkpoint: expected given as on rank 0, found not given"),
        (
            &format!("{checkpoint} --save-every 3"),
            &format!("{checkpoint} --save-every 4"),
            "--save-every: expected 3 as on rank 0, found 4",
        ),
        (
            "--comm-streams 1",
            "--comm-streams 2",
            "--comm-streams: expected 1 as on rank 0, found 2",
        ),
        (
            "",
            "--ranks 2 --compare-parameters 5",
            "--compare-parameters: expected not given as on rank 0, found 5",
        ),
    ] {
        let train = format!("{program} train --epochs 1 --engine processes");
        let either = format!("[ $RANK = 0 ] && exec {train} {first} || exec {train} {second}");
        let error = refused(&["launch", "-n", "2", "--", "sh", "-c", &either]);
        assert!(error.matches(named).count() >= 2, "{named}: {error}");
    }
}
