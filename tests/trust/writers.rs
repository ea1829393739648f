//! Several writers of one pair of files: what one of them was told is written stays, whoever comes
//! next, and what another program has put there is not replaced by an earlier version.

use std::path::Path;

use fusestep_tensor_file::{
    Claim, Files, Finished, Prepared, TensorFileError, commit_together, finish_interrupted_in,
};
use fusestep_testkit::{Fault, SimulatedDisk};
use xxhash_rust::xxh3::xxh3_64;

const PLACES: [&str; 2] = ["/run/p", "/state/s"];

fn disk() -> SimulatedDisk {
    let disk = SimulatedDisk::new(1, []);
    for folder in ["/run", "/state"] {
        disk.create_folder(Path::new(folder)).unwrap();
    }
    disk.sync_folder(Path::new("/")).unwrap();
    disk
}

fn write(disk: &SimulatedDisk, places: &[&str], text: &str) -> Result<(), TensorFileError> {
    let prepared = places.iter().map(|place| {
        let text = format!("{text} of {place}");
        Prepared::bytes_in(disk, Path::new(place), text.as_bytes())
    });
    commit_together(prepared.collect::<Result<_, _>>()?)
}

fn read(disk: &SimulatedDisk, place: &str) -> String {
    let bytes = disk.read(Path::new(place)).unwrap_or_default();
    String::from_utf8(bytes).unwrap()
}

/// The word that both files have, or none if they differ.
fn both(disk: &SimulatedDisk) -> Option<String> {
    let [p, s] = PLACES.map(|place| {
        let text = read(disk, place);
        text.split(' ').next().unwrap_or_default().to_owned()
    });
    (p == s).then_some(p)
}

/// Disks on which a writer of "new" has lost its power at each of its calls and "old" was before.
fn interrupted() -> impl Iterator<Item = SimulatedDisk> {
    (0..60).map(|at| {
        let disk = disk();
        write(&disk, &PLACES, "old").unwrap();
        disk.add_fault(disk.calls() + at, Fault::PowerLoss);
        let _ = write(&disk, &PLACES, "new");
        disk.clear_faults();
        if disk.is_dead() {
            disk.restart();
        }
        disk
    })
}

#[test]
fn a_step_on_either_file_alone_finishes_what_was_interrupted() {
    for place in PLACES {
        let mut finished = 0;
        for disk in interrupted() {
            let claim = Claim::of_in(&disk, &[Path::new(place)]).unwrap();
            finished += claim.finished().len();
            assert!(both(&disk).is_some(), "torn apart: {:?}", disk.files());
            let file = Prepared::bytes_in(&disk, Path::new(place), b"later").unwrap();
            claim.commit(vec![file]).unwrap();
            drop(claim);
            // The next one, on the other file or on both, leaves it there.
            for other in PLACES {
                assert_eq!(finish_interrupted_in(&disk, Path::new(other)).unwrap(), None);
            }
            assert_eq!(read(&disk, place), "later");
        }
        assert!(finished > 5, "{finished}");
    }
}

#[test]
fn a_file_restored_from_a_backup_is_not_written_over() {
    let (mut kept, mut dropped) = (0, 0);
    for text in ["a backup", "old of /run/p"] {
        for at in 0..2 {
            for disk in interrupted() {
                let place = Path::new(PLACES[at]);
                disk.overwrite(place, text.as_bytes());
                match finish_interrupted_in(&disk, Path::new(PLACES[1 - at])) {
                    Ok(Some(Finished::Kept { .. })) => kept += 1,
                    Ok(Some(Finished::Dropped { .. })) => {
                        dropped += 1;
                        let other = read(&disk, PLACES[1 - at]);
                        assert!(other.starts_with("old"), "{other}");
                    }
                    Ok(finished) => assert_eq!(finished, None),
                    // The bytes of before again: only the user knows what was meant.
                    Err(error) => assert!(error.to_string().contains("written again since")),
                }
                assert_eq!(read(&disk, PLACES[at]), text);
            }
        }
    }
    assert!(kept > 0 && dropped > 5, "{kept} kept, {dropped} dropped");
}

#[test]
fn a_writer_that_lives_is_not_taken_for_a_dead_one() {
    let disk = disk();
    write(&disk, &PLACES, "old").unwrap();
    let claim = Claim::of_in(&disk, &PLACES.map(Path::new)).unwrap();
    for places in [&PLACES[..], &PLACES[..1], &PLACES[1..]] {
        let error = write(&disk, places, "other").unwrap_err();
        assert!(matches!(error, TensorFileError::Busy { .. }), "{error}");
        assert!(error.to_string().contains(places[0]), "{error}");
    }
    assert_eq!(both(&disk).unwrap(), "old");
    drop(claim);
    write(&disk, &PLACES, "other").unwrap();
    assert_eq!(both(&disk).unwrap(), "other");
}

#[test]
fn what_a_program_without_claims_has_written_meanwhile_is_not_replaced() {
    for count in [1, 2] {
        for before in [true, false] {
            let disk = disk();
            if before {
                write(&disk, &PLACES, "old").unwrap();
            }
            let paths: Vec<&Path> = PLACES[..count].iter().map(Path::new).collect();
            let claim = Claim::of_in(&disk, &paths).unwrap();
            let written = paths[count - 1];
            disk.overwrite(written, b"theirs");
            let files = paths.iter().map(|path| Prepared::bytes_in(&disk, path, b"ours").unwrap());
            let error = claim.commit(files.collect()).unwrap_err();
            assert!(matches!(&error, TensorFileError::Changed { path } if path == written));
            assert_eq!(disk.read(written).unwrap(), b"theirs");
            drop(claim);
            let first = if before { "old of /run/p" } else { "" };
            assert!(count == 1 || read(&disk, PLACES[0]) == first);
            let left = disk.files().len();
            assert_eq!(left, if before { 2 } else { 1 }, "{:?}", disk.files());
        }
    }
}

/// A journal as version 1 had it, of one file in each of the places.
fn old_journal(disk: &SimulatedDisk) {
    let moves = PLACES.iter().zip(["/run/.fusestep-1-m-5-0.ready", "/state/.fusestep-1-m-5-1"]);
    let moves = moves.enumerate().map(|(at, (to, from))| {
        let from = if at == 0 { from.to_owned() } else { format!("{from}.ready-elsewhere") };
        disk.write_new(Path::new(&from), b"new").unwrap();
        let sum = xxh3_64(b"new");
        format!(r#"{{"from":"{from}","to":"{to}","len_bytes":3,"xxh3":"{sum:016x}"}}"#)
    });
    let moves = format!("[{}]", moves.collect::<Vec<_>>().join(","));
    let sum = xxh3_64(moves.as_bytes());
    let text = format!(
        r#"{{"format":"fusestep-journal","version":1,"moves":{moves},"xxh3":"{sum:016x}"}}"#
    );
    disk.write_new(Path::new("/run/.fusestep-p.journal"), text.as_bytes()).unwrap();
}

#[test]
fn journals_of_version_1_are_finished_unless_a_file_was_written_since() {
    for written in [None, Some(PLACES[0]), Some(PLACES[1])] {
        let disk = disk();
        write(&disk, &PLACES, "old").unwrap();
        old_journal(&disk);
        if let Some(place) = written {
            disk.overwrite(Path::new(place), b"later");
        }
        let finished = finish_interrupted_in(&disk, Path::new(PLACES[0])).unwrap().unwrap();
        match written {
            None => {
                assert_eq!(finished, Finished::Completed { place: PLACES[0].into() });
                assert_eq!(PLACES.map(|place| read(&disk, place)), ["new", "new"]);
            }
            Some(place) => {
                assert_eq!(finished, Finished::Dropped { place: place.into() });
                assert_eq!(read(&disk, place), "later");
            }
        }
        assert_eq!(disk.files().len(), 2, "{:?}", disk.files());
    }
}

#[test]
fn another_user_s_journal_is_not_followed_and_nothing_in_its_place_is_removed() {
    let disk = disk();
    write(&disk, &PLACES, "old").unwrap();
    old_journal(&disk);
    let path = Path::new("/run/.fusestep-p.journal");
    let text = disk.read(path).unwrap();
    disk.plant(path, &text);
    let error = write(&disk, &PLACES, "new").unwrap_err().to_string();
    assert!(error.contains("found another user's"), "{error}");
    assert_eq!((both(&disk).unwrap().as_str(), disk.read(path).unwrap()), ("old", text));
    // Nor are its files, where the journal is one's own.
    disk.remove_file(path).unwrap();
    let disk = self::disk();
    write(&disk, &PLACES, "old").unwrap();
    old_journal(&disk);
    disk.plant(Path::new("/run/.fusestep-1-m-5-0.ready"), b"new");
    let finished = finish_interrupted_in(&disk, Path::new(PLACES[0])).unwrap().unwrap();
    assert_eq!(finished, Finished::Dropped { place: PLACES[0].into() });
    assert_eq!(both(&disk).unwrap(), "old");
}
