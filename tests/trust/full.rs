//! Full disks: what a save could not complete does not stay on them.

use std::fs;
use std::path::Path;

use fusestep_checkpoint::{CheckpointFolder, Manifest};
use fusestep_tensor_file::{Files, is_part};
use fusestep_testkit::{Fault, SimulatedDisk};
use xxhash_rust::xxh3::xxh3_64;

use super::folders::{FOLDER, expect_saved, held, step_and_save};

const OTHER: &str = "/run/resharded";

/// A disk with the folder's checkpoint of one step.
fn disk() -> SimulatedDisk {
    let disk = SimulatedDisk::new(0, []);
    disk.create_folder(Path::new("/run")).unwrap();
    disk.sync_folder(Path::new("/")).unwrap();
    expect_saved(step_and_save(place(&disk)));
    disk
}

fn place(disk: &SimulatedDisk) -> CheckpointFolder<'_> {
    CheckpointFolder::of(disk, Path::new(FOLDER))
}

/// What lies in a checkpoint's folder, but for its list of generations, and parts of files: those
/// of a process that has died are found by its number, and here it is this one's.
fn names(disk: &SimulatedDisk, folder: &str) -> Vec<String> {
    let mut names = disk.list(Path::new(folder)).unwrap_or_default();
    names.retain(|name| name != ".fusestep-generations" && !is_part(name));
    names.sort_unstable();
    names
}

#[test]
fn a_save_that_fails_on_a_full_disk_leaves_nothing_of_it() {
    let mut failed = 0;
    for at in 0.. {
        let disk = disk();
        let (before, calls) = (names(&disk, FOLDER), disk.calls());
        disk.add_fault(calls + at, Fault::Full);
        let outcomes = step_and_save(place(&disk));
        if disk.calls() <= calls + at || outcomes.iter().all(Result::is_ok) {
            break;
        }
        failed += 1;
        assert_eq!(names(&disk, FOLDER), before, "full at call {at}: {outcomes:?}");
        disk.make_room();
        assert_eq!(held(place(&disk)).0, 1);
        expect_saved(step_and_save(place(&disk)));
    }
    assert!(failed > 10, "{failed}");
}

#[test]
fn what_a_save_that_died_has_left_goes_before_the_next_one_needs_room() {
    let mut left = 0;
    for at in 0.. {
        let disk = disk();
        let (before, calls) = (names(&disk, FOLDER), disk.calls());
        disk.add_fault(calls + at, Fault::PowerLoss);
        step_and_save(place(&disk));
        if disk.calls() <= calls + at {
            break;
        }
        disk.restart();
        if held(place(&disk)).0 > 1 {
            continue;
        }
        left += usize::from(names(&disk, FOLDER) != before);
        disk.add_fault(disk.calls(), Fault::Full);
        let outcomes = step_and_save(place(&disk));
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!(names(&disk, FOLDER), before, "died at call {at}");
    }
    assert!(left > 5, "{left}");
}

#[test]
fn what_a_save_of_another_checkpoint_has_left_stays() {
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for folder in [&own, &other] {
        expect_saved(step_and_save(folder.path().into()));
    }
    let theirs = Manifest::read(other.path()).unwrap();
    let name = "step-00000007-a";
    let there = own.path().join(name);
    fs::rename(other.path().join(&theirs.generation), &there).unwrap();
    let list = |sum: &str| {
        let (format, checkpoint) = ("fusestep-generations", &theirs.checkpoint);
        let of = format!(r#""checkpoint":"{checkpoint}","generations":["{name}"]"#);
        format!(r#"{{"format":"{format}","version":1,{of},"xxh3":"{sum}"}}"#)
    };
    let sum = format!("{:016x}", xxh3_64(list("").as_bytes()));
    fs::write(own.path().join(".fusestep-generations"), list(&sum)).unwrap();
    expect_saved(step_and_save(own.path().into()));
    assert!(there.join("mark.json").exists() && there.join("model.safetensors").exists());
}

#[test]
fn resharding_that_fails_leaves_an_empty_folder() {
    let mut failed = 0;
    for at in 0.. {
        let disk = disk();
        let manifest = Manifest::read(place(&disk)).unwrap();
        let calls = disk.calls();
        disk.add_fault(calls + at, Fault::Full);
        let to = CheckpointFolder::of(&disk, Path::new(OTHER));
        if manifest.reshard(place(&disk), to, 3).is_ok() {
            break;
        }
        failed += 1;
        let left = disk.list(Path::new(OTHER)).unwrap_or_default();
        assert!(left.is_empty(), "full at call {at}: {left:?}");
    }
    assert!(failed > 10, "{failed}");
}
