//! A state's file compared with what it says of itself: its format and version, checksums of its
//! texts and tensors, and how many values are not finite.

use std::collections::{BTreeMap, HashMap};

use fusestep_tensor::{DType, ParamDesc, Quoted, Role};
use fusestep_tensor_file::TensorFile;
use xxhash_rust::xxh3::Xxh3;

use super::file::tensor_name;
use super::generation::checksum;
use super::manifest::refuse;
use super::values;
use crate::Result;

/// Metadata keys of what the file is.
pub(super) const FORMAT_KEY: &str = "format";
pub(super) const FORMAT: &str = "fusestep-state";
pub(super) const VERSION_KEY: &str = "version";
/// Newest version that is read.
pub(super) const VERSION: u64 = 2;

/// Metadata keys of checksums: of the other metadata, and of the parameters that the state belongs
/// to.
pub(super) const SUM: &str = "xxh3";
pub(super) const PARAMETERS: &str = "parameters_xxh3";

/// Metadata key of how many values are not finite, before the tensor's name.
const NON_FINITE: &str = "non_finite@";

/// Whether a file is of the version that had neither checksums nor a version; a single key that was
/// lost does not make it so.
pub(super) fn is_old(file: &TensorFile) -> bool {
    let newer = [FORMAT_KEY, VERSION_KEY, SUM, PARAMETERS];
    newer.iter().all(|key| !file.metadata().contains_key(*key))
}

/// Refuses other kinds of files, newer ones, and metadata that were changed.
pub(super) fn check_format(file: &TensorFile) -> Result<()> {
    if is_old(file) {
        return Ok(());
    }
    let text = |key| file.metadata().get(key).map_or("none", String::as_str);
    if text(FORMAT_KEY) != FORMAT {
        return Err(refuse(file.path(), FORMAT_KEY, FORMAT, Quoted(text(FORMAT_KEY))));
    }
    let version = text(VERSION_KEY).parse::<u64>().ok();
    if version.is_none_or(|version| version > VERSION) {
        let expected = format!("at most {VERSION}; use a newer fusestep");
        return Err(refuse(file.path(), VERSION_KEY, expected, Quoted(text(VERSION_KEY))));
    }
    let (expected, found) = (text(SUM), sum_of(file.metadata()));
    if expected != found {
        let expected = format!("metadata with checksum {}", Quoted(expected));
        return Err(refuse(file.path(), SUM, expected, found));
    }
    Ok(())
}

/// Checksum of all metadata but itself.
pub(super) fn sum_of(metadata: &HashMap<String, String>) -> String {
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

pub(super) fn non_finite_key(tensor: &str) -> String {
    format!("{NON_FINITE}{tensor}")
}

pub(super) fn sum_key(tensor: &str) -> String {
    format!("{SUM}@{tensor}")
}

/// Refuses values that are not those that were saved, or that no run can have.
pub(super) fn check_values(
    file: &TensorFile,
    param: &ParamDesc,
    role: Role,
    dtype: DType,
) -> Result<()> {
    let name = tensor_name(param, role);
    let bytes = file.bytes(&name).unwrap_or_default();
    if !is_old(file) {
        let sum = file.metadata().get(&sum_key(&name));
        let (expected, found) = (sum.map_or("none", String::as_str), checksum(bytes));
        if expected != found {
            let expected = format!("bytes with checksum {}", Quoted(expected));
            return Err(refuse(file.path(), &name, expected, found));
        }
    }
    // What says so without a checksum may have been written by anyone.
    let key = non_finite_key(&name);
    let noted = file.metadata().get(&key).filter(|_| !is_old(file));
    let noted = match noted.map(|text| (text, text.parse())) {
        None => 0,
        Some((_, Ok(count))) => count,
        Some((text, Err(_))) => {
            return Err(refuse(file.path(), &key, "a count of values", Quoted(text)));
        }
    };
    let checked = values::check(role, dtype, bytes, noted);
    checked.map_err(|(expected, found)| refuse(file.path(), &name, expected, found))
}
