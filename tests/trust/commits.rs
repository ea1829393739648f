//! Two files, one commit: whatever fails and wherever, both are old or both are new.

use std::path::Path;

use fusestep_tensor_file::{
    Files, Prepared, TensorFileError, commit_together, finish_interrupted_in,
};
use fusestep_testkit::{Fault, SimulatedDisk};

const PLACES: [&str; 2] = ["/run/p", "/state/s"];

fn write(disk: &SimulatedDisk, text: &str) -> Result<(), TensorFileError> {
    let prepared = PLACES.iter().map(|place| {
        let bytes = format!("{text} of {place}");
        Prepared::bytes_in(disk, Path::new(place), bytes.as_bytes())
    });
    commit_together(prepared.collect::<Result<_, _>>()?)
}

/// The word that both files have, or `None` if they differ.
fn both(disk: &SimulatedDisk) -> Option<String> {
    let word = |place: &str| {
        let bytes = disk.read(Path::new(place)).unwrap_or_default();
        let text = String::from_utf8(bytes).unwrap();
        text.split(' ').next().unwrap_or_default().to_owned()
    };
    let [p, s] = PLACES.map(word);
    (p == s).then_some(p)
}

/// A disk with `old` in both places, or nothing.
fn disk(seed: u64, old: bool) -> SimulatedDisk {
    let disk = SimulatedDisk::new(seed, []);
    for folder in ["/run", "/state"] {
        disk.create_folder(Path::new(folder)).unwrap();
    }
    disk.sync_folder(Path::new("/")).unwrap();
    if old {
        write(&disk, "old").unwrap();
    }
    disk
}

#[test]
fn an_error_anywhere_leaves_both_old() {
    for old in [true, false] {
        let before = if old { "old" } else { "" };
        let mut refused = 0;
        for at in 0.. {
            let disk = disk(at, old);
            let calls = disk.calls();
            disk.add_fault(calls + at, Fault::Error);
            let outcome = write(&disk, "new");
            let found = both(&disk);
            if disk.calls() <= calls + at {
                break;
            }
            let expected = if outcome.is_ok() { "new" } else { before };
            assert_eq!(found.as_deref(), Some(expected), "fault at call {at}: {outcome:?}");
            refused += usize::from(outcome.is_err());
            // What the fault left behind must not decide what comes later.
            write(&disk, "next").unwrap();
            assert_eq!(both(&disk).as_deref(), Some("next"));
            for place in PLACES {
                assert_eq!(finish_interrupted_in(&disk, Path::new(place)).unwrap(), None);
            }
        }
        assert!(refused >= 10, "{refused} calls were refused");
    }
}

/// Faults of a commit: each call that changes something, and with it one of the next eight.
fn pairs_of_faults() -> impl Iterator<Item = [u64; 2]> {
    (0..45).flat_map(|first| (0..8).map(move |more| [first, first + more]))
}

#[test]
fn errors_anywhere_leave_both_files_of_one_step() {
    let (mut open, mut refused) = (0, 0);
    for has_links in [true, false] {
        for old in [true, false] {
            for faults in pairs_of_faults() {
                let disk = disk(1, old);
                if !has_links {
                    disk.refuse_links();
                }
                let calls = disk.calls();
                for at in faults {
                    disk.add_fault(calls + at, Fault::Error);
                }
                let outcome = write(&disk, "new");
                disk.clear_faults();
                for place in PLACES {
                    finish_interrupted_in(&disk, Path::new(place))
                        .unwrap_or_else(|error| panic!("{faults:?}: {outcome:?}, then {error}"));
                }
                let before = if old { "old" } else { "" };
                let expected: &[&str] = match &outcome {
                    Ok(()) => &["new"],
                    Err(TensorFileError::Interrupted { .. }) => &[before, "new"],
                    Err(_) => &[before],
                };
                let found = both(&disk).unwrap_or_else(|| panic!("{faults:?}: torn, {outcome:?}"));
                assert!(expected.contains(&found.as_str()), "{faults:?}: {found}, {outcome:?}");
                open += usize::from(matches!(outcome, Err(TensorFileError::Interrupted { .. })));
                refused += usize::from(outcome.is_err());
                write(&disk, "next").unwrap();
                assert_eq!(both(&disk).as_deref(), Some("next"));
            }
        }
    }
    assert!(open > 20 && refused > 500, "{open} were left to the next, {refused} failed");
}

#[test]
fn a_step_that_has_failed_does_not_come_back_with_a_loss_of_power() {
    for at in 0..45 {
        for seed in 0..100 {
            let disk = disk(seed, true);
            disk.add_fault(disk.calls() + at, Fault::Error);
            let outcome = write(&disk, "new");
            disk.clear_faults();
            disk.restart();
            finish_interrupted_in(&disk, Path::new(PLACES[0])).unwrap();
            let expected = if outcome.is_ok() { "new" } else { "old" };
            assert_eq!(both(&disk).as_deref(), Some(expected), "call {at}: {outcome:?}");
        }
    }
}

#[test]
fn a_loss_of_power_anywhere_leaves_both_old_or_both_new() {
    for old in [true, false] {
        let (mut kept, mut finished) = (0, 0);
        for at in 0..40 {
            for seed in 0..50 {
                let disk = disk(seed, old);
                let calls = disk.calls();
                disk.add_fault(calls + at, Fault::PowerLoss);
                let outcome = write(&disk, "new");
                if !disk.is_dead() {
                    outcome.unwrap();
                    continue;
                }
                disk.restart();
                // By whichever of the files the next one comes.
                let place = Path::new(PLACES[seed as usize % 2]);
                let outcome_of_next = finish_interrupted_in(&disk, place).unwrap();
                finished += usize::from(outcome_of_next.is_some());
                let found =
                    both(&disk).unwrap_or_else(|| panic!("call {at}, seed {seed}: torn apart"));
                let expected: &[&str] = match (&outcome, old) {
                    (Ok(()), _) => &["new"],
                    (Err(_), true) => &["old", "new"],
                    (Err(_), false) => &["", "new"],
                };
                assert!(expected.contains(&found.as_str()), "call {at}, seed {seed}: {found:?}");
                kept += usize::from(found != "new");
                write(&disk, "next").unwrap();
                assert_eq!(both(&disk).as_deref(), Some("next"));
            }
        }
        assert!(kept > 100 && finished > 100, "{kept} kept, {finished} finished");
    }
}

#[test]
fn a_full_disk_leaves_both_old_and_no_parts() {
    for at in 0..20 {
        let disk = disk(at, true);
        let calls = disk.calls();
        disk.add_fault(calls + at, Fault::Full);
        let outcome = write(&disk, "new");
        let expected = if outcome.is_ok() { "new" } else { "old" };
        assert_eq!(both(&disk).as_deref(), Some(expected), "full from call {at} on");
        assert_eq!(disk.files().len(), PLACES.len(), "{:?}", disk.files());
    }
}

#[test]
fn a_journal_that_is_damaged_moves_nothing_and_says_so() {
    let disk = disk(0, true);
    let path = Path::new("/run/.fusestep-p.journal");
    for text in ["", "{}", r#"{"format":"fusestep-journal","version":1,"moves":[],"xxh3":"0"}"#] {
        disk.write_new(path, text.as_bytes()).unwrap();
        let error = finish_interrupted_in(&disk, Path::new(PLACES[0])).unwrap_err();
        assert!(error.to_string().contains(".fusestep-p.journal"), "{error}");
        assert_eq!(both(&disk).as_deref(), Some("old"));
        disk.remove_file(path).unwrap();
    }
}
