//! Several programs that write the same files, and files that others write meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use fusestep_tensor_file::{Disk, Files};

use safetensors::SafeTensors;

use crate::{Folder, ok, refused, text};

/// Steps of a file's state.
fn steps(state: &Path) -> u64 {
    let bytes = fs::read(state).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1;
    metadata.metadata().as_ref().unwrap()["step"].parse().unwrap()
}

#[test]
fn steps_at_once_take_turns_and_each_that_ends_well_counts() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let other = folder.path("elsewhere");
    fs::create_dir(&other).unwrap();
    let state = other.join("state");
    let base = ["step", "--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
    let base = [&base[..], &["--out", text(&params), "--state-out", text(&state)]].concat();
    ok(&base);
    let again = [&base[..], &["--state", text(&state)]].concat();
    let files = (folder.files(), fs::read_dir(&other).unwrap().count());
    let mut done = 1;
    for _ in 0..4 {
        let start = |_| -> Child {
            let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
            command.args(&again).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let running: Vec<Child> = (0..4).map(start).collect();
        for child in running {
            let output = child.wait_with_output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || error.contains("no other program"), "{error}");
            done += u64::from(output.status.success());
        }
        assert_eq!(steps(&state), done);
    }
    assert!(done > 4, "{done}");
    // Parameters and state are of one step, or this would refuse them.
    ok(&again);
    assert_eq!((folder.files(), fs::read_dir(&other).unwrap().count()), files);
}

#[test]
fn outputs_with_the_names_of_folders_and_of_hidden_files_are_refused() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let journal = folder.path(".fusestep-out.journal");
    let new_folder = format!("{}/", text(&folder.path("new")));
    let files = folder.files();
    for (out, state_out) in [
        (text(&folder.path("out")), text(&journal)),
        (text(&journal), text(&folder.path("state"))),
        (&new_folder, text(&folder.path("state"))),
        (text(&folder.path("out")), &new_folder),
    ] {
        let base = ["step", "--params", text(&params), "--grads", text(&grads)];
        let error = refused(&[&base[..], &["--out", out, "--state-out", state_out]].concat());
        assert!(error.contains("another name") || error.contains("folder's"), "{error}");
        assert_eq!(folder.files(), files);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn files_that_only_seem_to_be_files_are_refused_at_once() {
    for path in ["/proc/self/pagemap", "/proc/self/status", "/dev/zero", "/proc"] {
        let error = refused(&["plan", path]);
        assert!(error.contains(path), "{error}");
    }
}

/// As under a limit of open files that leaves few, or without /proc.
#[test]
#[cfg(target_os = "linux")]
fn a_step_of_two_files_needs_few_open_files() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let (out, state) = (folder.path("out"), folder.path("state"));
    let script = "ulimit -n $0; exec \"$@\"";
    let run = |limit: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, limit, env!("CARGO_BIN_EXE_fusestep"), "step"]);
        command.args(["--params", text(&params), "--grads", text(&grads)]);
        command.args(["--out", text(&out), "--state-out", text(&state)]);
        command.output().unwrap()
    };
    let files = folder.files();
    // Not enough for the locks: said so, and nothing is left behind.
    let output = run("4");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("Too many open files"), "{error}");
    assert_eq!(folder.files(), files);
    let output = run("8");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(folder.files(), files + 2);
}

/// A model and its state in two folders, where a step was killed two days ago between its two
/// renames.
struct Killed {
    folder: Folder,
    params: PathBuf,
    grads: PathBuf,
    state: PathBuf,
    /// The step's state, complete and beside its place.
    ready: PathBuf,
    /// The file that leads from the state to the journal.
    pointer: PathBuf,
}

impl Killed {
    fn new() -> Self {
        let folder = Folder::new();
        let (params, grads) = folder.model();
        let root = fs::canonicalize(params.parent().unwrap()).unwrap();
        let (params, other) = (root.join(params.file_name().unwrap()), root.join("elsewhere"));
        fs::create_dir(&other).unwrap();
        let state = other.join("state");
        let base = ["step", "--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
        ok(&[&base[..], &["--out", text(&params), "--state-out", text(&state)]].concat());
        let old = [&params, &state].map(|place| fs::read(place).unwrap());
        let again = ["--state", text(&state), "--out", text(&params), "--state-out", text(&state)];
        ok(&[&base[..], &again].concat());
        let moved = [root.join(".fusestep-1-a-1-1.ready"), other.join(".fusestep-1-a-1-2")];
        let journal = root.join(format!(".fusestep-{}.journal", name(&params)));
        let sum = |bytes: &[u8]| {
            let path = root.join("bytes");
            fs::write(&path, bytes).unwrap();
            let sum = Disk.xxh3(&path).unwrap();
            fs::remove_file(&path).unwrap();
            format!("{sum:016x}")
        };
        let of_journal = sum(journal.as_os_str().as_encoded_bytes());
        let ready = format!("{}-{of_journal}.ready-elsewhere", text(&moved[1]));
        let moves = [(&moved[0], &params, &old[0]), (&PathBuf::from(&ready), &state, &old[1])];
        let file = |bytes: &[u8]| format!(r#""len_bytes":{},"xxh3":"{}""#, bytes.len(), sum(bytes));
        let moves = moves.map(|(from, to, old)| {
            let new = fs::read(to).unwrap();
            fs::write(from, &new).unwrap();
            fs::write(to, old).unwrap();
            let modified = fs::metadata(to).unwrap().modified().unwrap();
            let since = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
            let (from, to, new, old) = (from.display(), to.display(), file(&new), file(old));
            let old = format!(r#""old":{{{old},"modified_ns":{since}}}"#);
            format!(r#"{{"from":"{from}","to":"{to}",{new},{old}}}"#)
        });
        let moves = format!("[{}]", moves.join(","));
        let xxh3 = sum(moves.as_bytes());
        let head = r#""format":"fusestep-journal","version":2"#;
        fs::write(&journal, format!(r#"{{{head},"moves":{moves},"xxh3":"{xxh3}"}}"#)).unwrap();
        fs::rename(&moved[0], &params).unwrap();
        let pointer = other.join(format!(".fusestep-{}.pointer", sum(b"state")));
        let (head, path) = (r#""format":"fusestep-journal-pointer""#, journal.display());
        fs::write(&pointer, format!(r#"{{{head},"journal":"{path}"}}"#)).unwrap();
        let ready = PathBuf::from(ready);
        let part = fs::File::options().write(true).open(&ready).unwrap();
        part.set_modified(SystemTime::now() - Duration::from_secs(2 * 24 * 60 * 60)).unwrap();
        Self { folder, params, grads, state, ready, pointer }
    }
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn a_step_that_was_killed_days_ago_is_finished_whoever_writes_beside_its_files_first() {
    for neighbour in [false, true] {
        let Killed { folder, params, grads, state, ready, .. } = Killed::new();
        let base = ["step", "--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
        if neighbour {
            let out = state.with_file_name("another");
            let copy = folder.path("copy");
            fs::copy(&params, &copy).unwrap();
            let base = ["step", "--params", text(&copy), "--grads", text(&grads), "--lr", "1e-2"];
            ok(&[&base[..], &["--out", text(&out)]].concat());
            assert!(ready.exists(), "its journal is open");
        }
        let again = ["--state", text(&state), "--out", text(&params), "--state-out", text(&state)];
        ok(&[&base[..], &again].concat());
        assert_eq!(steps(&state), 3);
    }
}

#[test]
fn a_journal_beside_an_input_that_names_an_output_keeps_nobody_waiting() {
    let Killed { folder, params, grads, state, pointer, .. } = Killed::new();
    // Journals of version 1 have none.
    fs::remove_file(pointer).unwrap();
    let out = folder.path("out");
    let base = ["step", "--params", text(&params), "--grads", text(&grads), "--lr", "1e-2"];
    let places = ["--state", text(&state), "--out", text(&out), "--state-out", text(&state)];
    ok(&[&base[..], &places].concat());
    assert_eq!(steps(&state), 3);
}
