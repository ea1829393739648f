//! Which generations a save may write over and remove: those that its own checkpoint has begun.

use std::fs;
use std::path::{Path, PathBuf};

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::Files;
use fusestep_testkit::{Fault, SimulatedDisk};

use super::folders::{FOLDER, expect_saved, held, step_and_save};

/// All files below a folder and their bytes.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.clone(), fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn a_generation_whose_manifest_was_moved_away_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    expect_saved(step_and_save(folder.path().into()));
    let first = files(&at("step-00000001-a"));
    fs::rename(at("manifest.json"), at("mine.json")).unwrap();
    expect_saved(step_and_save(folder.path().into()));
    assert_eq!(files(&at("step-00000001-a")), first);
    assert_eq!(held(folder.path().into()).0, 1);
    // With both names of the step taken nothing is left to write to.
    fs::rename(at("manifest.json"), at("second.json")).unwrap();
    let before = files(folder.path());
    for (rank, outcome) in step_and_save(folder.path().into()).into_iter().enumerate() {
        let error = outcome.unwrap_err();
        for part in ["step-00000001-a and step-00000001-b", "put it back", "choose another"] {
            assert!(error.contains(part), "rank {rank}: {error}");
        }
    }
    assert_eq!(files(folder.path()), before);
    for name in ["mine.json", "second.json"] {
        fs::copy(at(name), at("manifest.json")).unwrap();
        assert_eq!(held(folder.path().into()).0, 1, "{name}");
    }
}

#[test]
fn another_checkpoints_generation_is_kept_where_there_is_no_manifest_yet() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    expect_saved(step_and_save(other.path().into()));
    let theirs = folder.path().join("step-00000001-a");
    fs::rename(other.path().join("step-00000001-a"), &theirs).unwrap();
    let before = files(&theirs);
    for _ in 0..3 {
        expect_saved(step_and_save(folder.path().into()));
    }
    assert_eq!(files(&theirs), before);
    assert_eq!(held(folder.path().into()).0, 3);
}

#[test]
fn a_generation_of_a_copy_of_the_checkpoint_is_kept() {
    let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    expect_saved(step_and_save(folder.path().into()));
    for (path, bytes) in files(folder.path()) {
        let to = copy.path().join(path.strip_prefix(folder.path()).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, bytes).unwrap();
    }
    // Both have one number from here on; the copy is two steps ahead.
    for _ in 0..2 {
        expect_saved(step_and_save(copy.path().into()));
    }
    let theirs = folder.path().join("step-00000003-a");
    fs::rename(copy.path().join("step-00000003-a"), &theirs).unwrap();
    let before = files(&theirs);
    for _ in 0..3 {
        expect_saved(step_and_save(folder.path().into()));
    }
    assert_eq!(files(&theirs), before);
    assert_eq!(held(folder.path().into()).0, 4);
    assert!(!folder.path().join("step-00000001-a").exists());
}

#[test]
fn saves_that_die_before_the_first_manifest_do_not_stand_in_the_way_of_the_next() {
    let mut died = 0;
    for fault in [Fault::PowerLoss, Fault::Error] {
        for (at, seed) in (0..60).flat_map(|at| [(at, 1), (at, 2)]) {
            let disk = SimulatedDisk::new(seed, []);
            disk.create_folder(Path::new("/run")).unwrap();
            disk.sync_folder(Path::new("/")).unwrap();
            let folder = CheckpointFolder::of(&disk, Path::new(FOLDER));
            for _ in 0..5 {
                disk.add_fault(disk.calls() + at, fault);
                let _ = step_and_save(folder);
                if disk.is_dead() {
                    disk.restart();
                }
                disk.clear_faults();
                if Manifest::read_if_any(folder).unwrap().is_some() {
                    break;
                }
                died += 1;
            }
            let before = held(folder).0;
            expect_saved(step_and_save(folder));
            assert_eq!(held(folder).0, before + 1, "{fault:?} at {at}, seed {seed}");
            let files = disk.files();
            let marks = files.iter().filter(|path| path.ends_with("mark.json"));
            assert_eq!(marks.count(), 1, "{fault:?} at {at}, seed {seed}: {files:?}");
        }
    }
    assert!(died > 200, "{died}");
}

#[test]
fn marks_of_the_first_version_are_known_and_changed_or_newer_ones_are_strangers() {
    let folder = tempfile::tempdir().unwrap();
    expect_saved(step_and_save(folder.path().into()));
    let mark = |manifest: &Manifest| folder.path().join(&manifest.generation).join("mark.json");
    type Change = fn(&mut serde_json::Map<String, serde_json::Value>);
    let changes: [(Change, bool); 4] = [
        (|_| {}, true),
        (|mark| mark.retain(|key, _| ["format", "checkpoint"].contains(&key.as_str())), true),
        (|mark| drop(mark.insert("note".to_owned(), "x".into())), true),
        (|mark| drop(mark.insert("version".to_owned(), 2.into())), false),
    ];
    for (change, ours) in changes {
        let manifest = Manifest::read(folder.path()).unwrap();
        let mut text = serde_json::from_slice(&fs::read(mark(&manifest)).unwrap()).unwrap();
        change(&mut text);
        fs::write(mark(&manifest), serde_json::to_vec(&text).unwrap()).unwrap();
        expect_saved(step_and_save(folder.path().into()));
        assert_eq!(!mark(&manifest).exists(), ours, "{text:?}");
    }
}

/// What a save that was killed was writing beside the manifest goes at the next save.
#[cfg(target_os = "linux")]
#[test]
fn parts_of_dead_processes_in_a_checkpoints_folder_go_at_the_next_save() {
    let folder = tempfile::tempdir().unwrap();
    expect_saved(step_and_save(folder.path().into()));
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    // As this process names its parts, with the number of the one that has ended.
    let own = fusestep_tensor_file::Prepared::bytes(&folder.path().join("x"), b"x").unwrap();
    let names = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let part = names().find_map(|name| {
        let name = name.into_string().unwrap();
        let rest = name.strip_prefix(".fusestep-")?.split_once('-')?.1.to_owned();
        name.ends_with(".part").then_some(rest)
    });
    let of_dead = folder.path().join(format!(".fusestep-{}-{}", child.id(), part.unwrap()));
    fs::write(&of_dead, "half a manifest").unwrap();
    expect_saved(step_and_save(folder.path().into()));
    assert!(!of_dead.exists());
    assert!(own.commit().is_ok(), "that of the living stays");
}
