//! Whole runs: training, timing, averages, and what the machine offers.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::{Folder, ok, refused, rule_names, tensor, text};

#[test]
fn training_reaches_97_percent_with_the_same_parameters_fused_and_naive() {
    let folder = Folder::new();
    let report = folder.path("report.html");
    let run = |more: &[&str]| -> Value {
        let mut args = vec!["train", "--json"];
        args.extend(more);
        serde_json::from_str(&ok(&args)).unwrap()
    };
    let fused = run(&["--report", text(&report)]);
    let naive = run(&["--naive", "--threads", "1"]);
    assert!(fused["test_accuracy"].as_f64().unwrap() >= 0.97);
    assert_eq!(fused["params_hash"], naive["params_hash"]);
    assert_ne!(fused["params_hash"], run(&["--seed", "2"])["params_hash"]);
    let page = fs::read_to_string(&report).unwrap();
    assert!(page.contains("<polyline") && !page.contains("http"));
    let error = refused(&["train", "--lr", "1e9", "--epochs", "2"]);
    assert!(error.contains("expected a finite loss"), "{error}");
}

#[test]
fn every_rule_learns_the_digits_at_its_default_rate() {
    for rule in rule_names().filter(|&rule| rule != "adamw") {
        let args = ["train", "--json", "--epochs", "6", "--optimizer", rule];
        let trained: Value = serde_json::from_str(&ok(&args)).unwrap();
        let accuracy = trained["test_accuracy"].as_f64().unwrap();
        assert!(accuracy >= 0.9, "{rule}: {accuracy}");
        assert_eq!(trained["optimizer"], rule);
        // candle's AdamW runs beside ours only where the two are to agree.
        assert!(trained["candle_ns_per_step"].is_null());
    }
}

#[test]
fn parameters_of_16_bits_learn_the_digits_however_they_are_kept() {
    for (rule, flags) in [
        ("adamw", &["--dtype", "bf16", "--master-weights", "f32"][..]),
        ("momentum", &["--dtype", "bf16", "--master-weights", "remainder"]),
        ("lion", &["--dtype", "f16", "--master-weights", "f32"]),
        ("adagrad", &["--dtype", "bf16", "--rounding", "stochastic"]),
        ("lars", &["--dtype", "f16", "--lr", "3"]),
        ("lamb", &["--dtype", "bf16", "--state-dtype", "bf16", "--rounding", "stochastic"]),
    ] {
        let mut args = vec!["train", "--json", "--epochs", "6", "--optimizer", rule];
        args.extend(flags);
        let trained: Value = serde_json::from_str(&ok(&args)).unwrap();
        let accuracy = trained["test_accuracy"].as_f64().unwrap();
        assert!(accuracy >= 0.92, "{rule}, {flags:?}: {accuracy}");
        assert_eq!(trained["dtype"], flags[1]);
        let naive = [&args[..], &["--naive", "--threads", "1"]].concat();
        let naive: Value = serde_json::from_str(&ok(&naive)).unwrap();
        assert_eq!(trained["params_hash"], naive["params_hash"], "{rule}");
    }
    let error = refused(&["train", "--dtype", "f16", "--master-weights", "remainder"]);
    assert!(
        error.contains(
            "--master-weights with --optimizer adamw and parameters of f16 such as `layer0.bias`"
        ),
        "{error}"
    );
}

#[test]
fn bench_and_check_print_their_numbers() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[1000]},{"name":"b","shape":[7, 11]}]"#).unwrap();
    let json = ok(&["bench", text(&shapes), "--rounds", "1", "--peer", "candle", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    for key in [
        "ns_per_step",
        "naive_ns_per_step",
        "gb_per_s",
        "ceiling_gb_per_s",
        "share_of_ceiling",
        "candle_ns_per_step",
    ] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}");
    }
    assert_eq!(json["bytes_per_step"], 28 * 1077);
    for (rule, bytes) in [("sgd", 12), ("momentum", 20), ("lion", 20), ("rmsprop", 20)] {
        let args = ["bench", text(&shapes), "--rounds", "1", "--optimizer", rule, "--json"];
        let json: Value = serde_json::from_str(&ok(&args)).unwrap();
        assert_eq!(
            (&json["optimizer"], &json["bytes_per_step"]),
            (&rule.into(), &(bytes * 1077).into())
        );
    }
    let peer = ["bench", text(&shapes), "--optimizer", "lion", "--peer", "candle"];
    assert!(refused(&peer).contains("--peer candle: expected --optimizer adamw, found lion"));
    let found = ok(&["check"]);
    for part in ["simd", "threads", "cuda", "mpi", "nccl"] {
        assert!(found.contains(part), "{found}");
    }
}

#[test]
fn ranks_without_collectives_and_folders_without_gpus_are_refused() {
    let text = refused(&["check", "--ranks", "3"]);
    assert!(text.contains("--ranks: expected --engine too, found none"), "{text}");
    let meet = ["--engine", "thread", "--meet", "/nowhere", "--rank", "0"];
    let text = refused(&[&["check"], &meet[..]].concat());
    assert!(
        text.contains("expected --engine nccl or nccl-native with --meet, found thread"),
        "{text}"
    );
}

#[test]
fn bench_times_a_collective_between_threads() {
    let args = ["bench", "--collective", "all-reduce", "--ranks", "3", "--sizes", "4KiB,100000"];
    let json: Value = serde_json::from_str(&ok(&[&args[..], &["--json"]].concat())).unwrap();
    assert_eq!((&json["collective"], &json["engine"]), (&"all-reduce".into(), &"thread".into()));
    for (row, len_bytes) in json["rows"].as_array().unwrap().iter().zip([4096, 100_000]) {
        assert_eq!((&row["ranks"], &row["len_bytes"]), (&3.into(), &len_bytes.into()));
        for key in
            ["seconds", "best_seconds", "bytes_per_second", "ceiling_seconds", "share_of_ceiling"]
        {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key}");
        }
    }
    assert!(ok(&args).contains("100,000 B"));
}

#[test]
fn bench_times_steps_of_ranks_beside_their_parts() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[100000]},{"name":"b","shape":[7, 11]}]"#).unwrap();
    let run = |more: &[&str]| -> Value {
        let base = ["bench", text(&shapes), "--rounds", "1", "--json"];
        serde_json::from_str(&ok(&[&base[..], more].concat())).unwrap()
    };
    // Whole steps in one pass, and apart: stage 2 takes gradients out of their buckets first.
    for (zero, bytes, gathers) in
        [("0", 44, false), ("1", 36, true), ("2", 48, true), ("3", 40, false)]
    {
        let found = run(&["--ranks", "2", "--zero", zero]);
        for key in ["ns_per_step", "reduce_ns", "update_ns", "ceiling_ns", "share_of_ceiling"] {
            assert!(found[key].as_f64().unwrap() > 0.0, "{key} at {zero}: {found}");
        }
        assert_eq!(found["bytes_per_element"], bytes, "{zero}");
        assert_eq!((&found["ranks"], &found["elements"]), (&2.into(), &100_077.into()));
        assert!(found["gather_ns"].as_f64().unwrap() > 0.0 || !gathers, "{found}");
        assert_eq!(found["gradient_bytes_copied"], 0, "{zero}");
    }
    let narrow = "--ranks 2 --zero 1 --dtype bf16 --optimizer lion";
    let narrow = run(&narrow.split(' ').collect::<Vec<_>>());
    assert_eq!((&narrow["dtype"], &narrow["optimizer"]), (&"bf16".into(), &"lion".into()));
    let printed = ok(&["bench", text(&shapes), "--rounds", "1", "--ranks", "3", "--apart"]);
    assert!(printed.contains("all parts alone"), "{printed}");
    let error = refused(&["bench", text(&shapes), "--ranks", "2", "--local-sgd", "4"]);
    assert!(error.contains("--local-sgd"), "{error}");
}

#[test]
fn check_tests_the_collectives_between_threads_and_says_what_mpi_takes() {
    let found = ok(&["check", "--engine", "thread", "--ranks", "3"]);
    assert!(found.contains("every collective is right"), "{found}");
    let json = ok(&["check", "--engine", "thread", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json["link"]["alpha_seconds"].as_f64().unwrap() >= 0.0);
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(5));
    if !cfg!(feature = "mpi") {
        let error = refused(&["check", "--engine", "mpi"]);
        assert!(error.contains("--features mpi`"), "{error}");
    }
}

#[test]
fn several_processes_that_know_nothing_of_each_other_are_refused() {
    let start = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fusestep"));
        let output = command.args(args).env("OMPI_COMM_WORLD_SIZE", "4").output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[3]}]"#).unwrap();
    let collective = ["bench", "--collective", "all-reduce", "--sizes", "4KiB"];
    let processes = ["--engine", "processes"];
    for (args, found) in [
        (&["check"][..], "found none"),
        (&["check", "--engine", "thread"], "found thread"),
        (&["train"], "found none"),
        (&[&["check"], &processes[..]].concat(), "found processes"),
        (&[&["train"], &processes[..]].concat(), "found processes"),
        (&["train", "--ranks", "2", "--engine", "processes"], "found processes"),
        (&[&["bench", text(&shapes), "--ranks", "4"], &processes[..]].concat(), "found processes"),
        (&[&collective[..], &processes].concat(), "found processes"),
    ] {
        let error = start(args);
        let named = format!(
            "4 processes were started together by mpirun of Open MPI (OMPI_COMM_WORLD_SIZE=4), and \
             each would take itself for the whole; expected --engine mpi (check, train, bench), \
             {found}"
        );
        assert!(error.contains(&named), "{args:?}: {error}");
    }
    if !cfg!(feature = "mpi") {
        let error = start(&["check", "--engine", "mpi"]);
        assert!(
            error.contains("this build leaves MPI out") && error.contains("4 processes"),
            "{error}"
        );
    }
}

#[test]
fn processes_that_torchrun_has_started_find_each_other_and_other_engines_are_refused() {
    let folder = Folder::new();
    let start = |rank: &str, engine: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.args(["train", "--epochs", "1", "--json", "--engine", engine]);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        // A name of this start, as every run of torchrun has.
        let id = text(folder.0.path()).to_owned();
        command.envs([("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")]);
        command.env("TORCHELASTIC_RUN_ID", id);
        command.stdout(std::process::Stdio::piped());
        command.stderr(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let started = ["0", "1"].map(|rank| start(rank, "processes"));
    let ended = started.map(|rank| rank.wait_with_output().unwrap());
    assert!(ended.iter().all(|rank| rank.status.success()), "{ended:?}");
    let found: Value = serde_json::from_slice(&ended[0].stdout).unwrap();
    assert_eq!(found["ranks"], 2);
    assert!(ended[1].stdout.is_empty(), "{ended:?}");
    for engine in ["thread", "nccl"] {
        let ended = start("1", engine).wait_with_output().unwrap();
        let error = String::from_utf8(ended.stderr).unwrap();
        let named = "2 processes were started together by torchrun or `fusestep launch`";
        let works = format!("expected --engine processes (check, train, bench), found {engine}");
        assert!(error.contains(named) && error.contains(&works), "{error}");
    }
}

#[test]
fn a_program_is_launched_with_its_arguments_with_or_without_a_mark_before_it() {
    let program = [env!("CARGO_BIN_EXE_fusestep"), "train", "--engine", "processes", "--json"];
    for mark in [&["--"][..], &[]] {
        let short = ["--epochs", "1"];
        let told = ok(&[&["launch", "-n", "2"][..], mark, &program, &short].concat());
        assert!(told.contains("\"ranks\":2"), "{told}");
    }
    // A flag that is misspelt is no program.
    let error = refused(&["launch", "-n", "2", "--patiense", "3", "true"]);
    assert!(error.contains("--patiense"), "{error}");
}

#[test]
fn a_launcher_within_another_is_named() {
    let start = ["launch", "-n", "2", "--"];
    let nested = [&start[..], &[env!("CARGO_BIN_EXE_fusestep")], &start, &["true"]].concat();
    let error = refused(&nested);
    let named = "expected no launcher around `fusestep launch`, found that 2 processes";
    assert_eq!(error.matches(named).count(), 1, "{error}");
    assert!(!error.contains("--engine"), "{error}");
}

#[test]
fn another_number_of_ranks_than_a_launcher_has_started_is_named() {
    let program = env!("CARGO_BIN_EXE_fusestep");
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[3]}]"#).unwrap();
    let collective = ["bench", "--collective", "all-reduce", "--sizes", "4KiB"];
    for command in [
        &["check"][..],
        &["train", "--epochs", "1"],
        &["bench", text(&shapes), "--rounds", "1"],
        &collective,
    ] {
        let start = ["launch", "-n", "2", "--", program];
        let ranks = ["--engine", "processes", "--ranks", "3"];
        let error = refused(&[&start[..], command, &ranks].concat());
        let named = "expected the 2 that the launcher has started, found 3";
        assert_eq!(error.matches(named).count(), 2, "{command:?}: {error}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_cause_is_told_where_only_a_rank_other_than_the_first_fails() {
    let folder = Folder::new();
    let (whole, cut) = (folder.path("whole"), folder.path("cut"));
    let train = ["train", "--epochs", "1", "--ranks", "3", "--zero", "3"];
    ok(&[&train[..], &["--checkpoint", text(&whole)]].concat());
    let shards = [0, 1, 2].map(|rank| {
        let shard = format!("step-00000045-a/shard-{rank:05}.safetensors");
        fs::metadata(whole.join(shard)).unwrap().len()
    });
    let (second, others) = (shards[1], shards[0].max(shards[2]));
    assert!(others < second, "{shards:?}: another rank fails below");
    // One byte too little for the file of rank 1, and enough for every other file.
    let limited = "trap '' XFSZ; exec prlimit --fsize=$0 \"$@\"";
    let output = std::process::Command::new("sh")
        .args(["-c", limited, &(second - 1).to_string()])
        .arg(env!("CARGO_BIN_EXE_fusestep"))
        .args(train)
        .args(["--checkpoint", text(&cut)])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let first = error.lines().next().unwrap_or_default();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        first.contains("shard-00001.safetensors") && first.contains("File too large"),
        "{error}"
    );
    assert_eq!(error.matches("File too large").count(), 1, "{error}");
    // The save that was cut off is no checkpoint.
    assert!(!cut.join("manifest.json").exists());
}

#[test]
#[cfg(target_os = "linux")]
fn a_limit_on_files_is_an_error_that_leaves_files_as_they_were() {
    let folder = Folder::new();
    let [params, out] = ["params", "out"].map(|name| folder.path(name));
    crate::write(&params, &[("w", vec![0.5; 1000])]);
    fs::write(&out, "before").unwrap();
    let output = std::process::Command::new("prlimit")
        .args(["--fsize=1000", env!("CARGO_BIN_EXE_fusestep"), "step", "--params", text(&params)])
        .args(["--grads", text(&params), "--out", text(&out)])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("out") && error.contains("File too large"), "{error}");
    assert_eq!(fs::read(&out).unwrap(), b"before");
    assert_eq!(folder.files(), 2);
}

#[test]
fn processes_tell_the_cause_and_which_rank_they_follow() {
    let folder = Folder::new();
    fs::create_dir(folder.path("0")).unwrap();
    fs::write(folder.path("1"), "no folder").unwrap();
    fs::create_dir(folder.path("2")).unwrap();
    let train = "exec \"$0\" train --epochs 1 --engine processes --checkpoint \"$1/$RANK\"";
    let program = env!("CARGO_BIN_EXE_fusestep");
    let shell = ["sh", "-c", train, program, text(folder.0.path())];
    let error = refused(&[&["launch", "-n", "3", "--"][..], &shell].concat());
    let told = |start: &str, what: &str| {
        let line = error.lines().find(|line| line.starts_with(start));
        assert!(line.is_some_and(|line| line.contains(what)), "{error}");
    };
    told("error: rank 1: --checkpoint", "/1: expected a folder");
    told("error: rank 0: ", "rank 1 left the group");
    told("error: rank 2: ", "rank 1 left the group");
}

#[test]
fn shapes_under_another_name_are_told_what_they_should_be_called() {
    let folder = Folder::new();
    let shapes = folder.path("shapes");
    for content in [r#"[{"name":"a","shape":[3]}]"#, "[]"] {
        fs::write(&shapes, content).unwrap();
        let error = refused(&["plan", text(&shapes)]);
        assert!(error.contains("whose name ends in .json"), "{error}");
    }
}

#[test]
fn training_on_a_gpu_is_refused_at_once_where_the_build_leaves_cuda_out() {
    if cfg!(feature = "cuda") {
        return;
    }
    for ranks in [&[][..], &["--ranks", "2"]] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fusestep"))
            .args(["train", "--backend", "cuda"])
            .args(ranks)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let reasons = error.matches("this build leaves CUDA out").count();
        assert!(!output.status.success() && reasons == 1, "{error}");
        assert!(output.stdout.is_empty(), "{error}");
    }
}

#[test]
fn averages_are_written_beside_the_parameters() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [out, state, average] = ["out", "state", "average"].map(|name| folder.path(name));
    let run = |rule: &str, more: &[&str]| {
        let files = [&params, &grads, &out, &average].map(|path| text(path));
        let mut args = vec!["step", "--params", files[0], "--grads", files[1]];
        args.extend(["--out", files[2], "--average-out", files[3]]);
        args.extend(["--optimizer", rule, "--lr", "0.25", "--steps", "3"]);
        args.extend(more);
        ok(&args);
    };
    let floats =
        |path: &Path, name: &str| -> Vec<f32> { bytemuck::pod_collect_to_vec(&tensor(path, name)) };
    run("schedule-free", &["--beta1", "0.5", "--state-out", text(&state)]);
    // x = y + (1 - 1/beta1) (z - y), and 1 - 1/0.5 is -1.
    let (y, z) = (floats(&out, "c"), floats(&state, "c@base"));
    let expected: Vec<f32> = y.iter().zip(z).map(|(y, z)| y - (z - y)).collect();
    assert_eq!(floats(&average, "c"), expected);
    assert_ne!(expected, y);
    let metadata = SafeTensors::read_metadata(&fs::read(&average).unwrap()).unwrap().1;
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}
