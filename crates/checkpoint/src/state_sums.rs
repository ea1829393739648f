//! Checks of a state's file against its own metadata: format and version, checksums of texts and
//! tensors, and the number of values that are not finite.

use std::collections::{BTreeMap, HashMap};

use fusestep_tensor::{DType, Quoted, Role};
use fusestep_tensor_file::TensorFile;
use xxhash_rust::xxh3::Xxh3;

use crate::Result;
use crate::names::{SUM, checksum, non_finite_key, sum_key};
use crate::refusal::refuse;
use crate::values;

/// Metadata keys of the file's format and version.
pub(crate) const FORMAT_KEY: &str = "format";
pub(crate) const FORMAT: &str = "fusestep-state";
pub(crate) const VERSION_KEY: &str = "version";
/// Newest version that is read.
pub(crate) const VERSION: u64 = 2;

/// Metadata key of the checksum of the parameters that the state belongs to.
pub(crate) const PARAMETERS: &str = "parameters_xxh3";

/// Whether a file is of the first version, which had neither checksums nor a version. A newer file
/// that has lost a single key is not taken for one.
pub(crate) fn is_old(file: &TensorFile) -> bool {
    let newer = [FORMAT_KEY, VERSION_KEY, SUM, PARAMETERS];
    newer.iter().all(|key| !file.metadata().contains_key(*key))
}

/// Refuses files of another format or a newer version, and metadata that were changed.
pub(crate) fn check_format(file: &TensorFile) -> Result<()> {
    if is_old(file) {
        return Ok(());
    }
    let format = text_of(file, FORMAT_KEY)?;
    if format != FORMAT {
        return Err(refuse(file.path(), FORMAT_KEY, FORMAT, Quoted(format)));
    }
    let text = text_of(file, VERSION_KEY)?;
    match text.parse::<u64>() {
        Ok(version) if version <= VERSION => {}
        Ok(version) => {
            let expected = format!("at most {VERSION}; use a newer fusestep");
            return Err(refuse(file.path(), VERSION_KEY, expected, version));
        }
        Err(_) => {
            let expected = format!("a version from 1 to {VERSION}, which states have");
            return Err(refuse(file.path(), VERSION_KEY, expected, Quoted(text)));
        }
    }
    let (expected, found) = (text_of(file, SUM)?, sum_of(file.metadata()));
    if expected != found {
        let expected = format!("metadata with checksum {}, as they were saved", Quoted(expected));
        return Err(refuse(file.path(), SUM, expected, found));
    }
    Ok(())
}

/// The metadata text under a key that every file from version 2 on has.
fn text_of<'f>(file: &'f TensorFile, key: &str) -> Result<&'f str> {
    let found = file.metadata().get(key);
    found.map(String::as_str).ok_or_else(|| {
        let expected = "metadata of a whole state, as `step --state-out` and `save` write them";
        refuse(file.path(), key, expected, "none under this key; the file was written anew or cut")
    })
}

/// Checksum of all metadata but the checksum's own entry.
pub(crate) fn sum_of(metadata: &HashMap<String, String>) -> String {
    let mut hasher = Xxh3::new();
    let others: BTreeMap<_, _> = metadata.iter().filter(|(key, _)| *key != SUM).collect();
    for (key, value) in others {
        for text in [key, value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    format!("{:016x}", hasher.digest())
}

/// Refuses values that differ from the saved ones, or that no run produces.
pub(crate) fn check_values(file: &TensorFile, name: &str, role: Role, dtype: DType) -> Result<()> {
    let bytes = file.bytes(name).unwrap_or_default();
    if !is_old(file) {
        let (expected, found) = (text_of(file, &sum_key(name))?, checksum(bytes));
        if expected != found {
            let expected = format!("bytes with checksum {}", Quoted(expected));
            return Err(refuse(file.path(), name, expected, found));
        }
    }
    // Without a checksum anyone may have written this count, so it does not hold.
    let key = non_finite_key(name);
    let noted = file.metadata().get(&key).filter(|_| !is_old(file));
    let noted = match noted.map(|text| (text, text.parse())) {
        None => 0,
        Some((_, Ok(count))) => count,
        Some((text, Err(_))) => {
            return Err(refuse(file.path(), &key, "a count of values", Quoted(text)));
        }
    };
    let checked = values::check(role, dtype, bytes, noted);
    checked.map_err(|(expected, found)| refuse(file.path(), name, expected, found))
}
