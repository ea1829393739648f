//! Files and folders that could be lost, waited for or obeyed.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Folder, fusestep, ok, refused, tensor, text, write};

/// One step of AdamW on a folder's model.
fn step(folder: &Folder, more: &[&str]) -> Vec<String> {
    let (params, grads) = folder.model();
    let base = ["step", "--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
    let all = base.iter().chain(more);
    all.map(|argument| (*argument).to_owned()).collect()
}

fn as_args(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
#[cfg(unix)]
fn outputs_that_are_one_file_by_whatever_name_are_refused() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (out, hard, link) = (folder.path("out"), folder.path("hard"), folder.path("alias"));
    fs::write(&out, "precious").unwrap();
    fs::hard_link(&out, &hard).unwrap();
    std::os::unix::fs::symlink(folder.path("."), &link).unwrap();
    let spelled = folder.path("./out");
    let aliased = link.join("out");
    let files = folder.files();
    for (out, state_out, named) in [
        (&out, &spelled, "--out"),
        (&out, &aliased, "--out"),
        (&out, &hard, "--out"),
        (&out, &params, "--params"),
        (&out, &grads, "--grads"),
        (&grads, &hard, "--grads"),
    ] {
        let args = step(&folder, &["--out", text(out), "--state-out", text(state_out)]);
        let before = fs::read(&params).unwrap();
        let error = refused(&as_args(&args));
        assert!(error.contains(named) && error.contains("another file than"), "{error}");
        assert_eq!(fs::read(&params).unwrap(), before);
        assert_eq!(fs::read_to_string(folder.path("out")).unwrap(), "precious");
        assert_eq!(folder.files(), files);
    }
}

#[test]
fn state_of_other_parameters_is_refused_unless_it_is_asked_for() {
    let folder = Folder::new();
    let (params, state, out) =
        (folder.path("p.safetensors"), folder.path("state"), folder.path("out"));
    ok(&as_args(&step(&folder, &["--out", text(&out), "--state-out", text(&state)])));
    // The state belongs to what the first step has written and not to what it has read.
    let again = ["--state", text(&state), "--out", text(&out)];
    let error = refused(&as_args(&step(&folder, &again)));
    assert!(error.contains("--any-parameters") && error.contains(text(&params)), "{error}");
    ok(&as_args(&step(&folder, &[&again[..], &["--any-parameters"]].concat())));
    let error = refused(&as_args(&step(&folder, &[&again[..], &["--optimizer", "lamb"]].concat())));
    assert!(error.contains("expected lamb, found adamw"), "{error}");
}

#[test]
fn state_of_other_settings_is_refused_unless_it_is_asked_for() {
    let folder = Folder::new();
    let (state, out) = (folder.path("state"), folder.path("out"));
    let lars = ["--optimizer", "lars", "--exclude", "b", "--clip-norm", "1"];
    let first = [&lars[..], &["--out", text(&out), "--state-out", text(&state)]].concat();
    ok(&as_args(&step(&folder, &first)));
    let again = ["--state", text(&state), "--out", text(&out), "--any-parameters"];
    ok(&as_args(&step(&folder, &[&lars[..], &again].concat())));
    for (changed, named) in [
        (
            vec!["--momentum", "0.5"],
            "--momentum: expected 0.5, found 0.9; go on with --momentum 0.9",
        ),
        (vec!["--excluded", "trust-ratio"], "--excluded: expected trust_ratio, found plain_lr"),
        (vec!["--exclude", "a"], "--exclude and --weight-decay-of of `a`: expected 0, found none"),
        (vec!["--weight-decay", "0.25"], "--weight-decay: expected 0.25"),
    ] {
        let more = [&lars[..], &again, &changed].concat();
        let error = refused(&as_args(&step(&folder, &more)));
        assert!(error.contains(named) && error.contains("--any-settings"), "{error}");
        ok(&as_args(&step(&folder, &[&more[..], &["--any-settings"]].concat())));
    }
    let unclipped = [&lars[..4], &again].concat();
    let error = refused(&as_args(&step(&folder, &unclipped)));
    assert!(error.contains("--clip-norm: expected none, found 1"), "{error}");
}

#[test]
#[cfg(unix)]
fn a_replaced_file_keeps_its_mode_and_a_link_stays() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let (real, link) = (folder.path("real"), folder.path("link"));
    fs::write(&real, "old").unwrap();
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink("real", &link).unwrap();
    ok(&as_args(&step(&folder, &["--out", text(&link)])));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(tensor(&real, "b").len(), 4);
    assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
#[cfg(unix)]
fn pipes_and_devices_are_refused_at_once() {
    let folder = Folder::new();
    let (params, _) = folder.model();
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (pipe, params) = (text(&pipe), text(&params));
    let begun = Instant::now();
    for args in [
        vec!["step", "--params", pipe, "--grads", params, "--lr", "1e-2", "--out", "/dev/null"],
        vec!["step", "--params", params, "--grads", "/dev/zero", "--lr", "1e-2", "--out", pipe],
        vec!["step", "--params", params, "--grads", params, "--lr", "1e-2", "--out", pipe],
        vec!["plan", pipe],
        vec!["bench", pipe],
    ] {
        let error = refused(&args);
        assert!(error.contains("expected a file") || error.contains("ordinary file"), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_checkpoint_is_neither_replaced_nor_are_strangers_files() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let train = |more: &[&str]| {
        let base = ["train", "--epochs", "1", "--ranks", "2", "--checkpoint", text(&path)];
        fusestep(&[&base[..], more].concat())
    };
    fs::create_dir_all(path.join("step-by-step-notes")).unwrap();
    fs::write(path.join("step-by-step-notes/a"), "mine").unwrap();
    assert!(train(&[]).status.success());
    let manifest = fs::read(path.join("manifest.json")).unwrap();
    let error = String::from_utf8(train(&[]).stderr).unwrap();
    assert!(error.contains("--resume") && error.contains("of step"), "{error}");
    assert_eq!(fs::read(path.join("manifest.json")).unwrap(), manifest);
    assert!(train(&["--resume"]).status.success());
    fs::write(path.join("manifest.json"), "{\"theirs\": 1}").unwrap();
    for more in [&[][..], &["--resume"]] {
        let refused = train(more);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && error.contains("manifest.json"), "{error}");
        // No rank has begun to train, and each is heard once.
        assert_eq!(
            error.lines().filter(|line| line.contains("manifest.json")).count(),
            1,
            "{error}"
        );
    }
    assert_eq!(fs::read_to_string(path.join("manifest.json")).unwrap(), "{\"theirs\": 1}");
    assert_eq!(fs::read_to_string(path.join("step-by-step-notes/a")).unwrap(), "mine");
}

#[test]
fn edited_manifests_are_not_intact() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    ok(&["train", "--epochs", "1", "--checkpoint", text(&path)]);
    let manifest = fs::read_to_string(path.join("manifest.json")).unwrap();
    for (from, to) in [
        ("\"epochs\": \"1\"", "\"epochs\": \"2\""),
        ("\"batches\": \"0\"", "\"batches\": \"7\""),
        ("\"skipped\": 0", "\"skipped\": 3"),
        ("\"version\": 5", "\"version\": 1"),
    ] {
        assert!(manifest.contains(from), "{from} in {manifest}");
        fs::write(path.join("manifest.json"), manifest.replace(from, to)).unwrap();
        let error = refused(&["checkpoint", "verify", text(&path)]);
        assert!(error.contains("checksum"), "{error}");
    }
}

#[test]
fn a_verifier_beside_a_saver_sees_whole_checkpoints_only() {
    let folder = Folder::new();
    let path = folder.path("checkpoint");
    let saver = Command::new(env!("CARGO_BIN_EXE_fusestep"))
        .args([
            "train",
            "--epochs",
            "4",
            "--ranks",
            "2",
            "--save-every",
            "1",
            "--checkpoint",
            text(&path),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut saver = saver.unwrap();
    let mut verified = 0;
    while saver.try_wait().unwrap().is_none() {
        if path.join("manifest.json").exists() {
            let found = ok(&["checkpoint", "verify", text(&path)]);
            assert!(found.contains("all intact"), "{found}");
            verified += 1;
        }
    }
    assert!(saver.wait().unwrap().success());
    assert!(verified > 5, "{verified}");
}

#[test]
fn a_page_that_cannot_be_written_is_known_before_the_training() {
    let folder = Folder::new();
    let begun = Instant::now();
    let error =
        refused(&["train", "--epochs", "1000", "--report", text(&folder.path("none/page.html"))]);
    assert!(error.contains("page.html") && begun.elapsed() < Duration::from_secs(30), "{error}");
}

#[test]
fn pages_of_peers_that_cannot_be_written_are_known_before_anything_is_timed() {
    let folder = Folder::new();
    let shapes = folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[3]}]"#).unwrap();
    for flag in ["--report", "--svg"] {
        let begun = Instant::now();
        let page = folder.path("none/page");
        let bench = ["bench", text(&shapes), "--peers", "--rounds", "1000000"];
        let error = refused(&[&bench[..], &[flag, text(&page)]].concat());
        assert!(
            error.contains("none/page") && begun.elapsed() < Duration::from_secs(30),
            "{error}"
        );
    }
}

#[test]
fn names_are_quoted_short_and_never_obeyed() {
    let folder = Folder::new();
    let (params, grads) = (folder.path("p"), folder.path("g"));
    let page = folder.path("plan.html");
    let name = format!("\u{1b}[2J\u{202e}{}", "x".repeat(5_000));
    write(&params, &[(&name, vec![1.0])]);
    write(&grads, &[("other", vec![1.0])]);
    let args = [
        "step",
        "--params",
        text(&params),
        "--grads",
        text(&grads),
        "--lr",
        "1e-2",
        "--out",
        text(&page),
    ];
    let error = refused(&args);
    assert!(error.contains("\\u{1b}[2J\\u{202e}xxx") && error.len() < 1_000, "{error}");
    let plan = ok(&["plan", text(&params), "--html", text(&page)]);
    assert!(plan.contains("\\u{202e}xxx") && !plan.contains('\u{1b}'), "{plan}");
    let page = fs::read_to_string(&page).unwrap();
    assert!(!page.contains('\u{1b}') && !page.contains('\u{202e}'));
}

#[test]
fn what_files_have_in_a_megabyte_is_quoted_in_a_line() {
    let folder = Folder::new();
    let (shapes, params, grads) = (folder.path("s.json"), folder.path("p"), folder.path("g"));
    let long = "x".repeat(1_000_000);
    let entry = |more: &str| format!("[{{\"name\":\"a\",\"shape\":[1],{more}}}]");
    for (content, named) in [
        (entry(&format!("\"dtype\":\"f{long}\"")), "found dtype `fxxx"),
        (entry(&format!("\"{long}\":1")), "unknown field `xxx"),
        (entry(&format!("\"dtype\":[\"{long}\"]")), "invalid type"),
        (format!("[{{\"name\":\"a\",\"shape\":\"{long}\"}}]"), "xxx"),
        (format!("\"\\u009b{long}\""), "\\u{9b}xxx"),
    ] {
        fs::write(&shapes, content).unwrap();
        let error = refused(&["plan", text(&shapes)]);
        assert!(
            error.contains(named) && error.contains("s.json") && error.len() < 1_000,
            "{named}: {}",
            &error[..error.len().min(1_000)]
        );
    }
    let ones = vec!["1"; 1_900].join(",");
    for (path, shape) in [(&params, format!("[{ones}]")), (&grads, format!("[1,{ones}]"))] {
        let header =
            format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[0,4]}}}}");
        write_raw(path, header.as_bytes(), 4);
    }
    let files = ["--params", text(&params), "--grads", text(&grads)];
    let error = refused(&[&["step"][..], &files, &["--out", text(&shapes)]].concat());
    assert!(
        error.contains("gradient of `a`: expected f32 [1, 1, 1") && error.len() < 1_000,
        "{}",
        &error[..error.len().min(1_000)]
    );
}

#[test]
fn names_are_the_same_in_json_and_not_obeyed_there_either() {
    let folder = Folder::new();
    let (params, grads, out) = (folder.path("p"), folder.path("g"), folder.path("out"));
    let name = "a\u{1b}\u{7f}\u{9b}2J\u{202e}\u{2028}\"\\é𝄞\n";
    for path in [&params, &grads] {
        write(path, &[(name, vec![1.0])]);
    }
    let files = ["--params", text(&params), "--grads", text(&grads)];
    let more = ["--out", text(&out), "--update-norms", "--json"];
    let json = ok(&[&["step"][..], &files, &more].concat());
    let obeyed = |c: char| c.is_control() && c != '\n' || matches!(c, '\u{202e}' | '\u{2028}');
    assert!(!json.contains(obeyed), "{json:?}");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["updates"][0]["name"], name);
}

#[test]
fn the_note_on_tensors_that_are_no_parameters_quotes_their_names() {
    let folder = Folder::new();
    let path = folder.path("p");
    let name = format!("\\u001b[2J\\u202e{}", "x".repeat(3_000));
    let header =
        format!("{{\"{name}\":{{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}}}");
    write_raw(&path, header.as_bytes(), 4);
    let output = fusestep(&["plan", text(&path)]);
    let note = String::from_utf8(output.stderr).unwrap();
    assert!(note.contains("\\u{1b}[2J\\u{202e}xxx") && note.len() < 1_000, "{note:?}");
    let entry = |name: &str, at: usize| {
        let end = at + 4;
        format!("\"{name}\":{{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[{at},{end}]}}")
    };
    for (header, told) in [
        (
            format!("{{{}}}", entry("num", 0)),
            "1 tensor is not floating point and so no parameters: num\n",
        ),
        (
            format!("{{{},{}}}", entry("num", 0), entry("z", 4)),
            "2 tensors are not floating point and so no parameters: num, …\n",
        ),
    ] {
        write_raw(&path, header.as_bytes(), 4 * header.matches("I32").count());
        let note = String::from_utf8(fusestep(&["plan", text(&path)]).stderr).unwrap();
        assert!(note.contains(told), "{note:?}");
    }
}

/// Writes a file whose header is this text and whose data are so long.
fn write_raw(path: &Path, header: &[u8], data_bytes: usize) {
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header).unwrap();
    file.write_all(&vec![0; data_bytes]).unwrap();
}

/// Runs `plan` in an address space of 4 times the file and 64 MiB for code and stacks; its message.
#[cfg(target_os = "linux")]
fn refused_within_4_times(path: &Path) -> String {
    let kibibytes = 4 * fs::metadata(path).unwrap().len() / 1024 + (64 << 10);
    let limited = format!("ulimit -v {kibibytes}; exec \"$@\"");
    let program = env!("CARGO_BIN_EXE_fusestep");
    let output =
        Command::new("sh").args(["-c", &limited, "sh", program, "plan", text(path)]).output();
    let output = output.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    error
}

#[test]
#[cfg(target_os = "linux")]
fn a_long_header_takes_a_few_times_its_length_and_no_more() {
    let folder = Folder::new();
    let path = folder.path("long");
    let long = 40_000_000;
    let list = format!(
        "{{\"a\":{{\"dtype\":\"F32\",\"shape\":[1{}],\"data_offsets\":[0,4]}}}}",
        ",1".repeat(long / 2)
    );
    let nested = format!("{{\"a\":{}", "[".repeat(long));
    let names: String = (0..long / 8).map(|at| format!("\"{at:04x}\":0,")).collect();
    for (header, named) in [
        (list, "expected at most 4096 bytes"),
        (nested, "expected JSON"),
        (format!("{{{names}\"z\":0}}"), "header"),
        (format!("{{\"__metadata__\":{{{names}\"z\":0}}}}"), "__metadata__"),
        (format!("{{\"__metadata__\":{{\"a\":\"{}\"}},\"b\":1}}", "y".repeat(long)), "`b`"),
    ] {
        write_raw(&path, header.as_bytes(), 4);
        let error = refused_within_4_times(&path);
        assert!(
            error.contains(named) && error.len() < 1_000,
            "{}",
            &error[..error.len().min(1_000)]
        );
    }
}
