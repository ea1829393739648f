//! Threads, memory and open files that the system does not give: errors, and never a panic.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use crate::{Folder, text};

/// Whether this user may start programs as another one; root has no limit on threads.
fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout == b"0\n")
}

/// The command as a user who has no thread but its own.
struct Poor {
    folder: Folder,
    user: String,
}

impl Poor {
    fn new() -> Self {
        let folder = Folder::new();
        fs::set_permissions(folder.0.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_fusestep"), folder.path("fusestep")).unwrap();
        Self { folder, user: (60_000 + std::process::id() % 5_000).to_string() }
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid", &self.user, "--clear-groups", "prlimit", "--nproc=1:1"])
            .arg(self.folder.path("fusestep"))
            .args(args)
            .current_dir(self.folder.0.path())
            .output()
            .unwrap()
    }
}

#[test]
fn one_thread_takes_no_other_and_more_are_named_where_there_are_none() {
    if !is_root() {
        eprintln!("skipped: only root can start a program as another user");
        return;
    }
    let poor = Poor::new();
    let (params, grads) = poor.folder.model();
    let shapes = poor.folder.path("shapes.json");
    fs::write(&shapes, r#"[{"name":"a","shape":[100000]}]"#).unwrap();
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", "out"];
    let train = ["train", "--epochs", "1", "--json"];
    let bench = ["bench", text(&shapes), "--rounds", "1"];
    let one = ["--threads", "1"];
    for args in [
        &["plan", text(&shapes)][..],
        &["check"],
        &[&step[..], &one].concat(),
        &[&bench[..], &one].concat(),
        &[&train[..], &one].concat(),
        &[&train[..], &one, &["--ranks", "1"]].concat(),
    ] {
        let ended = poor.run(args);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{args:?}: {error}");
    }
    for (args, named) in [
        (&step[..], "found that the system starts fewer"),
        (&step[..], "use --threads 1"),
        (&bench, "use --threads 1"),
        (&train, "use --threads 1"),
        (&[&step[..], &["--threads", "3"]].concat(), "use --threads 1"),
        (&[&train[..], &["--ranks", "2"]].concat(), "expected a thread for each processor"),
        (&[&train[..], &one, &["--ranks", "2"]].concat(), "expected a thread for each processor"),
        (&[&bench[..], &one, &["--peer", "candle"]].concat(), "set RAYON_NUM_THREADS=1"),
        (&[&train[..], &one, &["--model", "transformer"]].concat(), "set RAYON_NUM_THREADS=1"),
        (&["check", "--engine", "thread"], "cannot start a thread for each rank"),
        (&[&bench[..], &["--ranks", "2"]].concat(), "cannot start a thread for each rank"),
        (&["launch", "-n", "2", "--", "true"], "cannot start /proc/self/exe as the guard"),
        (&["launch", "-n", "2", "--", "true"], "allow more processes (ulimit -u"),
        (&[&train[..], &["--ranks", "2", "--engine", "processes"]].concat(), ""),
    ] {
        let ended = poor.run(args);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {error}");
        assert!(error.contains(named) && !error.contains("panicked"), "{args:?}: {error}");
    }
}

/// Runs the command under a limit that the shell sets.
fn limited(limit: &str, args: &[&str]) -> Output {
    Command::new("bash")
        .args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")])
        .arg(env!("CARGO_BIN_EXE_fusestep"))
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn memory_for_tensors_that_is_not_given_is_an_error() {
    let folder = Folder::new();
    let [shapes, params, out, state] =
        ["shapes.json", "params", "out", "state"].map(|name| folder.path(name));
    fs::write(&shapes, r#"[{"name":"a","shape":[16000000]}]"#).unwrap();
    crate::write(&params, &[("w", vec![0.5; 16_000_000])]);
    let bench = ["bench", text(&shapes), "--rounds", "1", "--threads", "1"];
    let files = [text(&params), text(&out), text(&state)];
    let step = ["step", "--params", files[0], "--grads", files[0], "--out", files[1]];
    let step = [&step[..], &["--state-out", files[2], "--threads", "1"]].concat();
    let (mut refused, mut done) = (0, 0);
    for args in [&bench[..], &step] {
        for mib in (90..720).step_by(45) {
            let ended = limited(&format!("-v {}", mib << 10), args);
            let error = String::from_utf8_lossy(&ended.stderr);
            assert!(matches!(ended.status.code(), Some(0 | 1)), "{mib} MiB, {args:?}: {error}");
            assert!(!error.contains("panicked"), "{mib} MiB, {args:?}: {error}");
            if ended.status.success() { done += 1 } else { refused += 1 }
        }
    }
    assert!(done > 0 && refused > 0, "{done} done, {refused} refused");
}

#[test]
fn a_limit_on_address_space_leaves_processes_room_or_is_named() {
    let args = ["train", "--epochs", "1", "--json", "--ranks", "2", "--engine", "processes"];
    // Less than the memory of any machine that has two ranks' parts mapped whole.
    let ended = limited("-v 3000000", &args);
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{error}");
}

#[test]
fn too_few_open_files_are_not_told_as_a_folder_that_others_do_not_see() {
    let mut named = 0;
    for files in 4..14 {
        let folder = Folder::new();
        let train = ["train", "--epochs", "1", "--ranks", "8", "--zero", "1", "--checkpoint"];
        let run = folder.path("run");
        let args = [&train[..], &[text(&run)]].concat();
        let ended = limited(&format!("-n {files}"), &args);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(!error.contains("a folder that all ranks see"), "{files}: {error}");
        assert!(!error.contains("panicked"), "{files}: {error}");
        named += usize::from(error.contains("Too many open files"));
    }
    assert!(named > 0, "no limit was met");
}
