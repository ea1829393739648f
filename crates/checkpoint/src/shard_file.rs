//! File of a generation, written and read back: tensors, or ranges of tensors, with their
//! checksums.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use fusestep_tensor::{DType, Quoted, Shape};
use fusestep_tensor_file::{FileKind, Prepared, TensorBytes, TensorFile, serialize};

use crate::CheckpointFolder;
use crate::Result;
use crate::manifest::ShardSpec;
use crate::names::{MODEL_FILE, checksum, non_finite_key, shard_file, sum_key};
use crate::place::sync;
use crate::refusal::refuse;

/// Consecutive elements of a tensor, as they go to a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorPart<'a> {
    /// Name of the tensor, `<name>@<role>`.
    pub(crate) tensor: &'a str,
    pub(crate) dtype: DType,
    pub(crate) first: u64,
    pub(crate) bytes: &'a [u8],
    /// Place in the model's file.
    pub(crate) of_model: Option<InModel<'a>>,
    /// Number of values that are infinite or NaN; 0 for roles that readers do not check.
    pub(crate) non_finite: u64,
}

/// Name and shape of a parameter in the model's file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InModel<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a Shape,
}

/// Writes the model's file: whole parameters under their own names, for any program. Its metadata
/// give the tensors' names in the checkpoint.
pub(crate) fn write_model(
    folder: CheckpointFolder<'_>,
    generation: &str,
    parts: &[TensorPart<'_>],
) -> Result<ShardSpec> {
    // Some loaders ask what framework's conventions the tensors follow.
    let mut metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut tensors = Vec::with_capacity(parts.len());
    for part in parts {
        let Some(InModel { name, shape }) = part.of_model else {
            continue;
        };
        metadata.insert(tensor_key(name), part.tensor.to_owned());
        metadata.insert(sum_key(name), checksum(part.bytes));
        let bytes = TensorBytes::of(part.dtype, shape, Cow::Borrowed(part.bytes));
        tensors.push((name.to_owned(), bytes));
    }
    write_file(folder, generation, MODEL_FILE.to_owned(), (tensors, metadata))
}

/// Writes one file of a generation, synced.
pub(crate) fn write_shard(
    folder: CheckpointFolder<'_>,
    generation: &str,
    shard: usize,
    parts: &[TensorPart<'_>],
) -> Result<ShardSpec> {
    let mut metadata = HashMap::new();
    let mut tensors = Vec::with_capacity(parts.len());
    let mut names: HashSet<String> = parts.iter().map(|part| part.tensor.to_owned()).collect();
    let mut known = HashSet::new();
    for part in parts {
        // A rank may have several ranges of one tensor; all but the first get names of their own.
        let mut name = part.tensor.to_owned();
        if !known.insert(part.tensor) {
            let mut free = (1u64..).map(|at| format!("{}~{at}", part.tensor));
            name = free.find(|name| !names.contains(name)).unwrap_or(name);
            names.insert(name.clone());
            metadata.insert(tensor_key(&name), part.tensor.to_owned());
        }
        metadata.insert(first_key(&name), part.first.to_string());
        metadata.insert(sum_key(&name), checksum(part.bytes));
        note(&mut metadata, &name, part);
        let numel = (part.bytes.len() / part.dtype.len_bytes()) as u64;
        let shape = Shape::new([numel])?;
        let bytes = TensorBytes::of(part.dtype, &shape, Cow::Borrowed(part.bytes));
        tensors.push((name, bytes));
    }
    write_file(folder, generation, shard_file(shard), (tensors, metadata))
}

type FileContent<'a> = (Vec<(String, TensorBytes<'a>)>, HashMap<String, String>);

fn write_file(
    folder: CheckpointFolder<'_>,
    generation: &str,
    file: String,
    (tensors, metadata): FileContent<'_>,
) -> Result<ShardSpec> {
    let within = folder.join(generation);
    let path = within.join(&file);
    let bytes = serialize(&path, &tensors, metadata)?;
    Prepared::bytes_in(folder.files, &path, &bytes)?.commit()?;
    sync(folder, &within)?;
    Ok(ShardSpec { file, len_bytes: bytes.len() as u64, xxh3: checksum(&bytes) })
}

/// The length of a file, which must be the length in the manifest.
pub(crate) fn shard_len(
    folder: CheckpointFolder<'_>,
    generation: &str,
    shard: &ShardSpec,
) -> Result<u64> {
    let path = folder.join(generation).join(&shard.file);
    let missing = |found: String| refuse(&path, "shard", "a file of the manifest", found);
    match folder.files.kind(&path) {
        Ok(FileKind::File { len_bytes }) if len_bytes == shard.len_bytes => Ok(len_bytes),
        Ok(FileKind::File { len_bytes }) => {
            Err(refuse(&path, "length", format_args!("{} bytes", shard.len_bytes), len_bytes))
        }
        Ok(_) => Err(missing("no ordinary file".to_owned())),
        Err(error) => Err(missing(error.to_string())),
    }
}

/// Reads a file and compares its bytes with the length and checksum in the manifest.
pub(crate) fn read_shard(
    folder: CheckpointFolder<'_>,
    path: &Path,
    spec: &ShardSpec,
) -> Result<TensorFile> {
    let bytes = folder
        .files
        .read(path)
        .map_err(|error| refuse(path, "shard", "a file of the manifest", error))?;
    if bytes.len() as u64 != spec.len_bytes {
        return Err(refuse(path, "length", format_args!("{} bytes", spec.len_bytes), bytes.len()));
    }
    let found = checksum(&bytes);
    if found == spec.xxh3 {
        return Ok(TensorFile::parse(path, bytes)?);
    }
    // The tensors' checksums serve to name the damaged tensor.
    let file = TensorFile::parse(path, bytes);
    let damaged = file.as_ref().ok().and_then(|file| {
        let damaged = |name: &&String| {
            let sum = file.metadata().get(&sum_key(name));
            sum.is_none_or(|sum| *sum != checksum(file.bytes(name).unwrap_or_default()))
        };
        file.entries().keys().find(damaged).cloned()
    });
    let what = damaged.unwrap_or_else(|| "header".to_owned());
    let found = format_args!(
        "{found}; the file has changed since it was saved: put back a copy of it, or of the whole \
         checkpoint"
    );
    Err(refuse(path, &what, format_args!("checksum {}", Quoted(&spec.xxh3)), found))
}

pub(crate) fn first_key(tensor: &str) -> String {
    format!("first@{tensor}")
}

pub(crate) fn tensor_key(entry: &str) -> String {
    format!("tensor@{entry}")
}

/// Notes the number of values of a file's entry that are not finite, if there are any.
fn note(metadata: &mut HashMap<String, String>, entry: &str, part: &TensorPart<'_>) {
    if part.non_finite > 0 {
        metadata.insert(non_finite_key(entry), part.non_finite.to_string());
    }
}
