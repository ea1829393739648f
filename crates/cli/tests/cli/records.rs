//! Records of a run: lines of JSON, and events for TensorBoard.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{Folder, ok, refused, text};

/// The lines of a log of one kind.
fn lines(path: &Path, kind: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "{text}");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["kind"] == kind).collect()
}

fn number(of: &Value) -> f64 {
    of.as_f64().unwrap_or_else(|| panic!("expected a number, found {of}"))
}

#[test]
fn a_log_has_a_line_for_every_update_and_changes_no_bit() {
    let folder = Folder::new();
    let log = folder.path("run.jsonl");
    let train = ["train", "--epochs", "2", "--ranks", "2", "--accumulate", "4", "--zero", "1"];
    let more = ["--clip-norm", "1", "--update-norms", "--schedule", "warmup:4", "--json"];
    let train = [&train[..], &more].concat();
    let plain: Value = serde_json::from_str(&ok(&train)).unwrap();
    let logged = ok(&[&train[..], &["--log", text(&log)]].concat());
    let logged: Value = serde_json::from_str(&logged).unwrap();
    assert_eq!(plain["params_hash"], logged["params_hash"]);

    let [run] = &lines(&log, "run")[..] else { panic!("one line on the run") };
    assert_eq!((&run["world"], &run["rank"]), (&2.into(), &0.into()));
    assert_eq!(run["settings"]["clip-norm"], 1);
    assert_eq!(run["resumed_step"], Value::Null);
    let command = run["command"].as_str().unwrap();
    assert!(command.starts_with("fusestep train --epochs 2 --ranks 2"), "{command}");
    let date = run["date"].as_str().unwrap();
    assert!(date.len() == 20 && date.starts_with("20") && date.ends_with('Z'), "{date}");
    assert!(number(&run["machine"]["processors"]) >= 1.0);

    let steps = lines(&log, "step");
    assert_eq!(plain["steps"], steps.len());
    for (at, step) in steps.iter().enumerate() {
        assert_eq!((&step["step"], &step["skipped"]), (&(at + 1).into(), &false.into()));
        // A warm-up of four updates, to the rule's rate in the fifth.
        let lr = 2e-3 * ((at + 1) as f64 / 5.0).min(1.0);
        assert!((number(&step["lr"]) - lr).abs() < 1e-9, "{step}");
        assert!(number(&step["grad_norm"]) > 0.0 && number(&step["bytes_sent"]) > 0.0, "{step}");
        let each = step["update_norms"].as_object().unwrap();
        let squares: f64 = each.values().map(|norm| number(norm).powi(2)).sum();
        assert!(each.contains_key("layer0.weight"), "{step}");
        assert!((squares.sqrt() / number(&step["update_norm"]) - 1.0).abs() < 1e-6, "{step}");
        let parts = step["seconds"].as_object().unwrap().values().map(number);
        let model = number(&step["model_seconds"]);
        let batch = number(&step["batch_seconds"]);
        assert!(model > 0.0 && parts.sum::<f64>() + model <= batch, "{step}");
    }
    let epochs = lines(&log, "epoch");
    for (epoch, told) in epochs.iter().zip(plain["history"].as_array().unwrap()) {
        assert_eq!(epoch["test_loss"], told["test_loss"]);
        let of_epoch = steps.iter().filter(|step| step["epoch"] == epoch["epoch"]);
        let losses: Vec<f64> = of_epoch.map(|step| number(&step["loss"])).collect();
        // The epoch's last update is of fewer samples.
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        assert!((mean / number(&told["loss"]) - 1.0).abs() < 0.1, "{mean} {told}");
    }
    assert_eq!(epochs.len(), 2);
}

#[test]
fn updates_that_are_skipped_are_recorded_as_such() {
    let folder = Folder::new();
    let log = folder.path("run.jsonl");
    let scale = ["--dtype", "f16", "--loss-scale", "8.507059173023462e37"];
    ok(&[&["train", "--epochs", "1", "--log", text(&log)], &scale[..]].concat());
    let steps = lines(&log, "step");
    assert_eq!(steps.len(), 45);
    for step in steps {
        assert_eq!((&step["skipped"], &step["step"]), (&true.into(), &0.into()));
        // JSON has no infinity.
        assert!(number(&step["non_finite"]) > 0.0 && step["grad_norm"].is_null(), "{step}");
    }
}

#[test]
fn lanes_are_recorded_once_an_update() {
    let folder = Folder::new();
    let log = folder.path("run.jsonl");
    let lanes = ["--lanes", "2", "--accumulate", "2", "--ranks", "2"];
    let run = [&["train", "--epochs", "1", "--json", "--log", text(&log)], &lanes[..]].concat();
    let told: Value = serde_json::from_str(&ok(&run)).unwrap();
    let steps = lines(&log, "step");
    assert_eq!(told["steps"], steps.len());
    assert!(steps.iter().all(|step| number(&step["loss"]) > 0.0));
}

#[test]
fn a_run_that_goes_on_adds_to_its_log_and_another_run_is_refused() {
    let folder = Folder::new();
    let (log, saved) = (folder.path("run.jsonl"), folder.path("saved"));
    let train = ["train", "--checkpoint", text(&saved), "--log", text(&log), "--epochs"];
    ok(&[&train[..], &["1"]].concat());
    let before = fs::read_to_string(&log).unwrap();
    for other in [&["train", "--epochs", "1", "--log", text(&log)][..], &["train", "--log"]] {
        let other = if other.len() == 2 {
            [other, &[text(&log), "--ranks", "2"]].concat()
        } else {
            other.to_vec()
        };
        let error = refused(&other);
        assert!(error.contains("--log ") && error.contains("or --resume to add to it"), "{error}");
        assert_eq!(fs::read_to_string(&log).unwrap(), before);
    }
    // A line that a killed run has begun stays one line.
    fs::write(&log, format!("{before}{{\"kind\":")).unwrap();
    ok(&[&train[..], &["2", "--resume"]].concat());
    let after = fs::read_to_string(&log).unwrap();
    let rest = after.strip_prefix(&format!("{before}{{\"kind\":\n")).unwrap();
    let rest: Vec<Value> = rest.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&rest[0]["kind"], &rest[0]["resumed_step"]), (&"run".into(), &45.into()));
    assert_eq!((&rest[1]["step"], &rest[1]["epoch"]), (&46.into(), &2.into()));
}

#[test]
fn records_that_cannot_be_written_are_refused_before_training() {
    let folder = Folder::new();
    let file = folder.path("file");
    fs::write(&file, "precious").unwrap();
    let (nowhere, within) = (folder.path("none/run.jsonl"), file.join("events"));
    let folder_text = text(folder.0.path());
    for (flag, place, found) in [
        ("--log", text(&nowhere), "no such folder"),
        ("--log", folder_text, "expected"),
        ("--log", text(&file), "found one of 8 bytes"),
        ("--tensorboard", text(&file), "found a file"),
        ("--tensorboard", text(&within), "found a file at"),
    ] {
        for ranks in ["1", "2"] {
            let error = refused(&["train", "--epochs", "1000", "--ranks", ranks, flag, place]);
            assert!(error.contains(flag) && error.contains(found), "{error}");
        }
    }
    let page = folder.path("page.html");
    let error = refused(&["train", "--log", text(&page), "--report", text(&page)]);
    assert!(error.contains("--log: expected another file than --report"), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    assert_eq!(folder.files(), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn of_ranks_that_are_processes_the_first_one_writes() {
    let folder = Folder::new();
    let (log, events) = (folder.path("run.jsonl"), folder.path("events"));
    let program = env!("CARGO_BIN_EXE_fusestep");
    let train = ["train", "--engine", "processes", "--epochs", "1", "--log", text(&log)];
    let launch = ["launch", "-n", "2", "--", program];
    ok(&[&launch[..], &train, &["--tensorboard", text(&events)]].concat());
    assert_eq!((lines(&log, "run").len(), lines(&log, "step").len()), (1, 45));
    assert_eq!(lines(&log, "run")[0]["engine"], "processes");
    assert_eq!(fs::read_dir(events).unwrap().count(), 1);
}

/// CRC-32C by a table, as `masked_crc32c` of TensorFlow's readers expects it.
fn masked_crc(bytes: &[u8]) -> u32 {
    let table: Vec<u32> = (0..256u32)
        .map(|byte| {
            (0..8)
                .fold(byte, |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 })
        })
        .collect();
    let crc = bytes
        .iter()
        .fold(u32::MAX, |crc, byte| table[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8));
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Fields of a protocol buffer: numbers, and bytes of the others.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for at in 0.. {
            let (byte, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let (number, len) = match key & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (0, 8),
            2 => (0, varint(&mut bytes) as usize),
            5 => (0, 4),
            other => panic!("wire type {other}"),
        };
        let (content, rest) = bytes.split_at(len);
        found.push((key >> 3, number, content));
        bytes = rest;
    }
    found
}

/// Numbers of a file of events, by step and tag.
fn numbers_of_events(path: &Path) -> BTreeMap<(u64, String), f32> {
    let bytes = fs::read(path).unwrap();
    let (mut rest, mut found) = (&bytes[..], BTreeMap::new());
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let mut records = 0;
    while !rest.is_empty() {
        let (head, after) = rest.split_at(12);
        let len = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
        assert_eq!(masked_crc(&head[..8]), word(&head[8..]), "CRC of a length");
        let (event, after) = after.split_at(len);
        let (crc, after) = after.split_at(4);
        assert_eq!(masked_crc(event), word(crc), "CRC of an event");
        rest = after;
        records += 1;
        let event = fields(event);
        let time = f64::from_le_bytes(event[0].2.try_into().unwrap());
        assert!(event[0].0 == 1 && time > 1.7e9, "{event:?}");
        if records == 1 {
            assert_eq!((event[1].0, event[1].2), (3, &b"brain.Event:2"[..]));
            continue;
        }
        let step = event.iter().find(|field| field.0 == 2).unwrap().1;
        let summary = event.iter().find(|field| field.0 == 5).unwrap().2;
        for (_, _, value) in fields(summary) {
            let value = fields(value);
            let tag = String::from_utf8(value[0].2.to_vec()).unwrap();
            let number = f32::from_le_bytes(value[1].2.try_into().unwrap());
            assert_eq!(found.insert((step, tag.clone()), number), None, "{step} {tag}");
        }
    }
    found
}

#[test]
fn tensorboard_reads_the_numbers_of_the_log() {
    let folder = Folder::new();
    let (log, events) = (folder.path("run.jsonl"), folder.path("runs/first"));
    let train = ["train", "--epochs", "2", "--clip-norm", "1", "--update-norms"];
    ok(&[&train[..], &["--log", text(&log), "--tensorboard", text(&events)]].concat());
    let files: Vec<_> = fs::read_dir(&events).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    assert!(text(file).contains("/events.out.tfevents."), "{file:?}");
    let found = numbers_of_events(file);
    let steps = lines(&log, "step");
    for step in &steps {
        let at = step["step"].as_u64().unwrap();
        let of = |tag: &str| found.get(&(at, tag.to_owned())).copied();
        for key in ["loss", "lr", "grad_norm", "update_norm"] {
            assert_eq!(of(key), Some(number(&step[key]) as f32), "{key} of {at}");
        }
        assert_eq!(of("seconds/update"), Some(number(&step["seconds"]["update"]) as f32));
        let norm = number(&step["update_norms"]["layer0.bias"]) as f32;
        assert_eq!(of("update_norm/layer0.bias"), Some(norm));
        assert_eq!((of("loss_scale"), of("bytes_sent"), of("skipped")), (None, None, Some(0.0)));
    }
    let epoch = &lines(&log, "epoch")[1];
    let last = (steps.len() as u64, "test/accuracy".to_owned());
    assert_eq!(found[&last], number(&epoch["test_accuracy"]) as f32);
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_takes_no_more_is_warned_of_once_and_the_run_goes_on() {
    let folder = Folder::new();
    let log = folder.path("run.jsonl");
    let program = env!("CARGO_BIN_EXE_fusestep");
    let train = ["train", "--epochs", "2", "--json", "--log", text(&log)];
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -f 8 && exec \"$0\" \"$@\"", program])
        .args(train)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    let told = ["warning: --log ", "run.jsonl: cannot write (", "the run goes on"];
    assert!(told.iter().all(|told| error.matches(told).count() == 1), "{error}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["steps"], 90);
    let steps = fs::read_to_string(&log).unwrap().matches("\"kind\":\"step\"").count();
    assert!((1..90).contains(&steps), "{steps}");
}
