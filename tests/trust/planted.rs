//! What others may have put into a folder that is written to: nothing there is waited for, and
//! nothing is moved but what a commit of two files can have written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use fusestep_checkpoint::FolderLock;
use fusestep_tensor_file::{
    Disk, Files, Prepared, commit_together, finish_interrupted_in, remove_abandoned,
};
use fusestep_testkit::SimulatedDisk;
use xxhash_rust::xxh3::xxh3_64;

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// What `work` returns, which must not wait for anything.
fn at_once<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, done) = channel();
    std::thread::spawn(move || tell.send(work()));
    let waited = "it waits for what lies in the folder";
    done.recv_timeout(Duration::from_secs(20)).expect(waited)
}

#[test]
fn pipes_and_devices_named_like_journals_are_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    pipe(&at(".fusestep-p.journal"));
    pipe(&at("other.journal"));
    let path = at("p");
    at_once(move || Prepared::bytes(&path, b"p").unwrap().commit().unwrap());
    // A device without end, and a long file: neither is read into memory.
    symlink("/dev/zero", at(".fusestep-q.journal")).unwrap();
    let long = fs::File::create(at(".fusestep-r.journal")).unwrap();
    long.set_len(1 << 33).unwrap();
    let path = folder.path().to_owned();
    at_once(move || remove_abandoned(&path));
    let path = at("r");
    let error = at_once(move || fusestep_tensor_file::finish_interrupted(&path).unwrap_err());
    assert!(error.to_string().contains("at most"), "{error}");
    assert_eq!(fs::read(at("p")).unwrap(), b"p");
}

#[test]
fn what_lies_in_the_journal_s_place_is_named_and_stays() {
    let kinds: [fn(&Path); 3] =
        [pipe, |path| symlink("elsewhere", path).unwrap(), |path| fs::create_dir(path).unwrap()];
    for make in kinds {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let journal = at(".fusestep-p.journal");
        make(&journal);
        let kind = fs::symlink_metadata(&journal).unwrap().file_type();
        let files = ["p", "s"].map(|name| Prepared::bytes(&at(name), b"new").unwrap());
        let error = commit_together(files.into()).unwrap_err().to_string();
        assert!(error.contains(".fusestep-p.journal") && error.contains("move it"), "{error}");
        assert_eq!(fs::symlink_metadata(&journal).unwrap().file_type(), kind);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_long_journal_beside_thousands_of_files_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at(".fusestep-x.journal"), vec![b'.'; 1 << 20]).unwrap();
    for number in 0..20_000 {
        fs::write(at(&format!("a-file-with-a-name-of-its-own-{number}")), b"").unwrap();
    }
    let path = folder.path().to_owned();
    at_once(move || remove_abandoned(&path));
}

#[test]
fn names_that_hidden_files_have_and_names_of_folders_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, told) in [
        (".fusestep-p.journal", "expected another name than `.fusestep-…`"),
        (".FUSESTEP-p.journal", "expected another name than `.fusestep-…`"),
        ("new/", "a path that ends as a folder's does"),
        ("new/.", "a path that ends as a folder's does"),
    ] {
        let path = folder.path().join(name);
        let error = fusestep_tensor_file::check_writable(&path).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn files_that_are_not_as_long_as_they_say_are_refused() {
    for path in ["/proc/self/pagemap", "/proc/self/status", "/proc/self/maps"] {
        let path = Path::new(path);
        let error = at_once(move || Disk.read(path).unwrap_err().to_string());
        assert!(error.contains("said to be empty and is not"), "{error}");
    }
    let error = Disk.read(Path::new("/sys/kernel/mm/transparent_hugepage/enabled"));
    let told = error.unwrap_err().to_string();
    assert!(told.contains("as long as it is said to be") || told.contains("No such"), "{told}");
}

#[test]
fn a_pipe_in_the_lock_s_place_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    pipe(&folder.path().join("lock"));
    let path = folder.path().to_owned();
    let error = at_once(move || FolderLock::take(&path).unwrap_err().to_string());
    assert!(error.contains("lock") && error.contains("expected an empty file"), "{error}");
}

/// A journal with right checksums of moves from one path to another.
fn journal(moves: &[(&str, &str, &str)]) -> String {
    let step = |(from, to, text): &(&str, &str, &str)| {
        let (length, sum) = (text.len(), xxh3_64(text.as_bytes()));
        format!(r#"{{"from":"{from}","to":"{to}","len_bytes":{length},"xxh3":"{sum:016x}"}}"#)
    };
    let moves = format!("[{}]", moves.iter().map(step).collect::<Vec<_>>().join(","));
    let sum = xxh3_64(moves.as_bytes());
    format!(r#"{{"format":"fusestep-journal","version":1,"moves":{moves},"xxh3":"{sum:016x}"}}"#)
}

#[test]
fn a_journal_moves_only_what_a_commit_can_have_written() {
    const READY: &str = "/run/.fusestep-1-m-5-0.ready";
    const ELSEWHERE: &str = "/home/.fusestep-1-m-5-1.ready-elsewhere";
    let ours = [(READY, "/run/p"), (ELSEWHERE, "/home/s")];
    let cases: [(&[(&str, &str)], bool); 9] = [
        (&ours, true),
        (&[ours[0], ("/home/key", "/home/s")], false),
        (&[ours[0], ("/home/.fusestep-x.part", "/home/s")], false),
        (&[ours[0], (ELSEWHERE, "/other/s")], false),
        (&[ours[0], ("/home/.fusestep-1-m-5-0.ready", "/home/s")], false),
        (&[ours[0], ("/run/.fusestep-1-m-5-1.ready-elsewhere", "/run/s")], false),
        // Of another first file than the one that is asked for.
        (&[(READY, "/run/q"), ours[1]], false),
        (&[ours[1], ours[0]], false),
        (&[], false),
    ];
    for (moves, finishes) in cases {
        let disk = SimulatedDisk::new(1, []);
        for folder in ["/run", "/home", "/other"] {
            disk.create_folder(Path::new(folder)).unwrap();
        }
        let mut texts = Vec::new();
        for (from, to) in moves {
            disk.write_new(Path::new(from), from.as_bytes()).unwrap();
            disk.write_new(Path::new(to), b"old").unwrap();
            texts.push((*from, *to, *from));
        }
        let path = Path::new("/run/.fusestep-p.journal");
        disk.write_new(path, journal(&texts).as_bytes()).unwrap();
        let before = disk.files();
        let outcome = finish_interrupted_in(&disk, Path::new("/run/p"));
        if finishes {
            assert!(outcome.unwrap().is_some());
            continue;
        }
        let error = outcome.expect_err(&format!("{moves:?}")).to_string();
        assert!(error.contains(".fusestep-p.journal"), "{error}");
        assert_eq!(disk.files(), before, "{moves:?}");
        for (from, to) in moves {
            assert_eq!(disk.read(Path::new(from)).unwrap(), from.as_bytes());
            assert_eq!(disk.read(Path::new(to)).unwrap(), b"old");
        }
    }
}

#[test]
fn right_moves_under_a_wrong_checksum_are_not_made() {
    let (from, to) = ("/run/.fusestep-1-m-5-0.ready", "/run/p");
    let disk = SimulatedDisk::new(1, []);
    disk.create_folder(Path::new("/run")).unwrap();
    disk.write_new(Path::new(from), b"new").unwrap();
    let right = journal(&[(from, to, "new")]);
    let (moves, sum) = right.rsplit_once(r#""xxh3":""#).unwrap();
    let wrong = format!(r#"{moves}"xxh3":"0{}"#, &sum[1..]);
    let path = Path::new("/run/.fusestep-p.journal");
    disk.write_new(path, wrong.as_bytes()).unwrap();
    assert!(finish_interrupted_in(&disk, Path::new(to)).is_err());
    disk.remove_file(path).unwrap();
    disk.write_new(path, right.as_bytes()).unwrap();
    assert!(finish_interrupted_in(&disk, Path::new(to)).unwrap().is_some());
    assert_eq!(disk.read(Path::new(to)).unwrap(), b"new");
}

#[test]
fn a_newer_journal_says_that_a_newer_fusestep_wrote_it() {
    let disk = SimulatedDisk::new(1, []);
    disk.create_folder(Path::new("/run")).unwrap();
    let text = br#"{"format":"fusestep-journal","version":3,"steps":[]}"#;
    disk.write_new(Path::new("/run/.fusestep-p.journal"), text).unwrap();
    let error = finish_interrupted_in(&disk, Path::new("/run/p")).unwrap_err().to_string();
    assert!(error.contains("newer fusestep") && error.contains("version 3"), "{error}");
}
