//! Tensors as the bytes of a file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use fusestep_tensor::Quoted;

use crate::header::METADATA_KEY;
use crate::{TensorBytes, TensorFileError};

/// Serializes tensors and metadata to the bytes of a file.
///
/// # Errors
/// [`TensorFileError::Write`], which names `path`, if a tensor's bytes do not fit its shape. It
/// also refuses a name that occurs twice, and `__metadata__`, under which the format keeps its
/// texts.
pub fn serialize(
    path: &Path,
    tensors: &[(String, TensorBytes<'_>)],
    metadata: HashMap<String, String>,
) -> Result<Vec<u8>, TensorFileError> {
    let refused = |reason| TensorFileError::Write { path: path.to_owned(), reason };
    check_names(tensors).map_err(refused)?;
    check_memory(tensors).map_err(refused)?;
    let views = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let bytes = safetensors::serialize(views, metadata);
    let mut bytes = bytes.map_err(|error| refused(error.to_string()))?;
    sort_metadata(&mut bytes);
    Ok(bytes)
}

/// Refuses a file that there is no memory for: the library would abort the program.
fn check_memory(tensors: &[(String, TensorBytes<'_>)]) -> Result<(), String> {
    // A line of the header has a name, a dtype, dimensions and two offsets.
    let line = |name: &String| 2 * name.len() + 256;
    let wanted: usize = tensors.iter().map(|(name, one)| one.bytes.len() + line(name)).sum();
    let mut asked = Vec::<u8>::new();
    let given = asked.try_reserve_exact(wanted);
    drop(std::hint::black_box(asked));
    given.map_err(|_| {
        format!(
            "expected memory for {wanted} bytes of the file, found none; close other programs, or \
             raise the limit on address space (ulimit -v)"
        )
    })
}

/// Refuses names at which the library would panic, or with which nobody could read the file.
fn check_names(tensors: &[(String, TensorBytes<'_>)]) -> Result<(), String> {
    let mut seen = HashSet::with_capacity(tensors.len());
    for (name, _) in tensors {
        if name == METADATA_KEY {
            return Err(format!(
                "expected tensors of other names than `{METADATA_KEY}`, which is what the format \
                 keeps texts under, found one; rename it"
            ));
        }
        if !seen.insert(name) {
            return Err(format!(
                "`{}`: expected the name once, found it twice; rename one of the tensors",
                Quoted(name)
            ));
        }
    }
    Ok(())
}

/// Sorts the texts about a file by their keys. The library writes them in the order of a hash map,
/// so that equal content would not be equal bytes.
fn sort_metadata(bytes: &mut [u8]) {
    let Some((length, rest)) = bytes.split_first_chunk_mut::<8>() else {
        return;
    };
    let length = u64::from_le_bytes(*length) as usize;
    // The library writes the texts first. The tensors behind them are left alone: as values of JSON
    // they would take kilobytes each.
    let begin = format!("{{\"{METADATA_KEY}\":");
    let header = rest.get_mut(..length).filter(|header| header.starts_with(begin.as_bytes()));
    let Some(texts) = header.and_then(|header| header.get_mut(begin.len()..)) else {
        return;
    };
    let mut found = serde_json::Deserializer::from_slice(texts).into_iter();
    let Some(Ok(sorted)) = found.next() else {
        return;
    };
    let sorted: BTreeMap<String, String> = sorted;
    let len = found.byte_offset();
    let sorted = serde_json::to_vec(&sorted).unwrap_or_default();
    // Sorting changes no length.
    if sorted.len() == len {
        texts[..len].copy_from_slice(&sorted);
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use safetensors::Dtype;

    use super::*;
    use crate::TensorFile;

    #[test]
    fn equal_content_is_equal_bytes() {
        let texts = (0..50).map(|at| (format!("key {at} \u{e9}\n"), format!("{at}")));
        let texts: Vec<_> = texts.collect();
        let tensor =
            TensorBytes { dtype: Dtype::F32, shape: vec![2], bytes: Cow::Owned(vec![3; 8]) };
        let tensors = [("a".into(), tensor)];
        let written = |metadata: HashMap<String, String>| {
            serialize(Path::new("x"), &tensors, metadata).unwrap()
        };
        let first = written(texts.iter().cloned().collect());
        assert_eq!(written(texts.iter().rev().cloned().collect()), first);
        let read = TensorFile::parse(Path::new("x"), first).unwrap();
        assert_eq!(read.metadata(), &texts.into_iter().collect());
        assert_eq!(read.bytes("a").unwrap(), [3; 8]);
    }
}
