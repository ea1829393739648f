//! Shards whose checksums are right and whose values no run can have.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fusestep_checkpoint::Manifest;
use fusestep_tensor_file::{TensorFile, serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::folders::{expect_saved, loaded, sign, step_and_save};

/// Changes the second element of a tensor in the last file that has some of it, and every checksum
/// with it; which element of the tensor that is.
fn change(folder: &Path, tensor: &str, value: f32) -> u64 {
    let mut manifest = Manifest::read(folder).unwrap();
    let within = folder.join(&manifest.generation);
    for spec in manifest.shards.iter_mut().rev() {
        let path = within.join(&spec.file);
        let file = TensorFile::read(&path).unwrap();
        let Some(bytes) = file.bytes(tensor) else {
            continue;
        };
        let mut changed = bytes.to_vec();
        changed[4..8].copy_from_slice(&value.to_le_bytes());
        let mut texts = file.metadata().clone();
        let sum = format!("{:016x}", xxh3_64(&changed));
        texts.insert(format!("xxh3@{tensor}"), sum);
        let first: u64 = texts[&format!("first@{tensor}")].parse().unwrap();
        let entries = file.entries().iter().map(|(name, entry)| {
            let own = file.bytes(name).unwrap();
            let bytes = if name == tensor { &changed } else { own };
            (name.clone(), entry.with_bytes(bytes))
        });
        let bytes = serialize(&path, &entries.collect::<Vec<_>>(), texts).unwrap();
        fs::write(&path, &bytes).unwrap();
        spec.len_bytes = bytes.len() as u64;
        spec.xxh3 = format!("{:016x}", xxh3_64(&bytes));
        sign(manifest, folder);
        return first + 1;
    }
    panic!("no file has {tensor}");
}

#[test]
fn values_that_no_run_can_have_are_refused_whatever_their_checksums_say() {
    for (tensor, value, named) in [
        ("a@moment1", -1.0, None),
        ("a@moment2", -1.0, Some("finite values of at least 0, found -1")),
        ("b@moment2", f32::INFINITY, Some("finite values of at least 0, found inf")),
        ("b@moment1", f32::NAN, Some("finite values, found NaN")),
    ] {
        let folder = tempfile::tempdir().unwrap();
        expect_saved(step_and_save(folder.path().into()));
        let at = change(folder.path(), tensor, value);
        assert!(at > 1, "not of the first rank");
        match (loaded(folder.path().into()), named) {
            (Ok(_), None) => {}
            (Err(error), Some(named)) => {
                let error = error.to_string();
                let expected = format!("`{tensor}`: expected {named} at element {at}");
                assert!(error.contains(&expected), "{error}");
            }
            (outcome, _) => panic!("{tensor} = {value}: {outcome:?}"),
        }
    }
}

#[test]
fn counts_that_do_not_fit_the_state_are_refused() {
    let counts = |change: &dyn Fn(&mut Manifest)| {
        let folder = tempfile::tempdir().unwrap();
        expect_saved(step_and_save(folder.path().into()));
        let mut manifest = Manifest::read(folder.path()).unwrap();
        change(&mut manifest);
        sign(manifest, folder.path());
        loaded(folder.path().into()).unwrap_err().to_string()
    };
    let none = counts(&|manifest| manifest.step = 0);
    assert!(none.contains("@moment") && none.contains("zeros, since no step"), "{none}");
    let of_b = |count: u64| BTreeMap::from([("b".to_owned(), count)]);
    let none_of_b = counts(&|manifest| manifest.steps_of.extend(of_b(0)));
    assert!(none_of_b.contains("`b@moment"), "{none_of_b}");
    let ahead = counts(&|manifest| manifest.steps_of.extend(of_b(99)));
    assert!(ahead.contains("steps of `b`"), "{ahead}");
    for count in ["-1", "NaN", "1.5"] {
        let folder = tempfile::tempdir().unwrap();
        expect_saved(step_and_save(folder.path().into()));
        let path = folder.path().join("manifest.json");
        let text = fs::read_to_string(&path).unwrap();
        let at = text.find("\"step\": ").unwrap() + 8;
        let end = at + text[at..].find(',').unwrap();
        fs::write(&path, format!("{}{count}{}", &text[..at], &text[end..])).unwrap();
        assert!(loaded(folder.path().into()).is_err(), "{count}");
    }
}
