//! Counts that no machine has: refused at once, with the most that works.

use std::fs;

use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::{Folder, fusestep, ok, refused, text};

/// A count that wraps as soon as anything is added to it.
const HUGE: &str = "18446744073709551615";

#[test]
fn counts_on_the_command_line_are_refused_with_the_most_that_works() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[3]}]"#).unwrap();
    let (shapes, out) = (text(&shapes), folder.path("out"));
    let collective = ["bench", "--collective", "all-reduce"];
    let step = ["step", "--params", text(&params), "--grads", text(&grads)];
    let step = [&step[..], &["--out", text(&out)]].concat();
    let reshard = ["checkpoint", "reshard", "none", "--out", text(&out)];
    let ranks = ["train", "--ranks", "2"];
    for (command, flag, least, most) in [
        (&collective[..], "--sizes", 4, 17_179_869_184u64),
        (&["plan", shapes], "--world", 1, 65_536),
        (&reshard, "--world", 1, 65_536),
        (&["train"], "--ranks", 1, 1_024),
        (&["bench", shapes], "--ranks", 1, 1_024),
        (&collective, "--ranks", 1, 1_024),
        (&["check", "--engine", "thread"], "--ranks", 1, 1_024),
        (&["launch"], "--ranks", 1, 1_024),
        (&ranks, "--accumulate", 1, 1_000_000),
        (&ranks, "--gradient-merge", 1, 1_000_000),
        (&ranks, "--comm-streams", 0, 64),
        (&ranks, "--rings", 0, 64),
        (&["train"], "--epochs", 1, 1_000_000),
        (&["train"], "--batch", 1, 1_000_000),
        (&["bench", shapes], "--rounds", 1, 1_000_000),
        (&step, "--steps", 0, 1_000_000_000),
    ] {
        let mut beyond = vec![(most + 1).to_string(), HUGE.to_owned(), "-1".to_owned()];
        beyond.extend((least > 0).then(|| "0".to_owned()));
        for count in beyond {
            let count = format!("{flag}={count}");
            let error = refused(&[command, &[&count]].concat());
            let bounds = format!("from {least} to {most}");
            assert!(
                error.contains(&bounds) && error.contains("invalid value"),
                "{command:?} {count}: {error}"
            );
        }
    }
    assert!(!out.exists());
}

#[test]
fn counts_beyond_every_machine_are_refused_with_the_most_that_works() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    let plan = |count: usize, shape: &str, more: &[&str]| {
        let one = |at| format!("{{\"name\":\"a{at}\",\"shape\":{shape}}}");
        let all: Vec<String> = (0..count).map(one).collect();
        fs::write(&shapes, format!("[{}]", all.join(","))).unwrap();
        refused(&[&["plan", text(&shapes)][..], more].concat())
    };
    let tiny = ["--bucket-cap-mib", "0.000004", "--world"];
    let groups = ["--world", "2", "--zero", "1", "--shard-group", HUGE];
    let elements = "at most 1125899906842624 elements";
    for (count, shape, more, most) in [
        (1, "[1152921504606846976]", &[][..], elements),
        (1, "[4294967296,4294967296]", &[], elements),
        (1, "[1125899906842625]", &[], elements),
        (1, "[1125899906842624]", &["--world", "4"], "at most 1048576 for 4 ranks"),
        (1, "[2147483648]", &[&tiny[..], &["2"]].concat(), "2,147,483,648; give 0.5 or more"),
        (1, "[3]", &groups, "found 2 ranks"),
        // Bytes of a step's traffic, 28 for each element, go beyond 64 bits.
        (1_023, "[1125899906842624]", &[], "at most 18014398509481984 elements"),
    ] {
        let error = plan(count, shape, more);
        assert!(error.contains(most), "{count} {shape} {more:?}: {error}");
    }
}

#[test]
fn the_most_that_works_does() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    let one = |at| format!("{{\"name\":\"a{at}\",\"shape\":[1125899906842624]}}");
    let all: Vec<String> = (0..16).map(one).collect();
    fs::write(&shapes, format!("[{}]", all.join(","))).unwrap();
    let plan = ok(&["plan", text(&shapes), "--json"]);
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["traffic_bytes"], (28u64 << 50) * 16);
    // Some 2^66 bytes of calls in a thousand micro-steps are told as the most that can be.
    let each = ["--accumulate", "1000", "--reduce-each", "--bucket-cap-mib", "1e300"];
    let plan = ok(&[&["plan", text(&shapes), "--json", "--world", "2"], &each[..]].concat());
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["bytes_on_wire"], u64::MAX);
    fs::write(&shapes, r#"[{"name":"a","shape":[3]}]"#).unwrap();
    // Rules that only ever compare a count take any.
    for more in [["--bucket-cap-mib", "1e300"], ["--local-sgd", HUGE]] {
        ok(&[&["plan", text(&shapes), "--world", "2"][..], &more].concat());
    }
    let output = fusestep(&["train", "--epochs", "1", "--batch", "1000000"]);
    assert!(output.status.success());
}

#[test]
fn steps_beyond_what_a_state_can_count_are_refused() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (state, out) = (folder.path("state"), folder.path("out"));
    let sizes = [("b", 1), ("a", 17), ("empty", 0), ("c", 70_001)];
    let moments: Vec<(String, Vec<f32>)> = sizes
        .iter()
        .flat_map(|(name, numel)| {
            ["moment1", "moment2"].map(|role| (format!("{name}@{role}"), vec![0.0; *numel]))
        })
        .collect();
    let views = moments.iter().map(|(name, values)| {
        let view = TensorView::new(Dtype::F32, vec![values.len()], bytemuck::cast_slice(values));
        (name.as_str(), view.unwrap())
    });
    // Of version 1, which has no checksums.
    let metadata = [("step", "9007199254740991"), ("optimizer", "adamw")];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
    fs::write(&state, serialize(views, Some(metadata.into())).unwrap()).unwrap();
    let run = |steps| {
        let files = ["--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
        let more = ["--state", text(&state), "--out", text(&out), "--steps", steps];
        [&["step"][..], &files, &more].concat()
    };
    let error = refused(&run("2"));
    assert!(error.contains("--steps: expected at most 1 after"), "{error}");
    assert!(!out.exists());
    ok(&run("1"));
}

#[test]
fn threads_of_the_environment_are_held_to_what_the_flag_takes() {
    let check = |variable: &str, value: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fusestep"));
        command.args(["check"]).env(variable, value);
        command.output().unwrap()
    };
    for variable in ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"] {
        for value in ["257", "20000", HUGE, "-1", "abc", "2.5", "99999999999999999999999"] {
            let output = check(variable, value);
            let error = String::from_utf8(output.stderr).unwrap();
            let expected = format!(
                "error: {variable}: expected a number of threads from 1 to 256, or 0 for all \
                 processors, found `{value}`"
            );
            assert!(error.contains(&expected), "{error}");
            assert_eq!(output.status.code(), Some(1));
        }
        for value in ["", "0", "3"] {
            assert!(check(variable, value).status.success(), "{value:?}");
        }
    }
    let found = String::from_utf8(check("RAYON_NUM_THREADS", "3").stdout).unwrap();
    assert!(found.contains("3 in use"), "{found}");
}
