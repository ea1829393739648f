//! A checkpoint as a folder: shards first, the manifest last, the old one kept until the new one is whole.
//!
//! ```text
//! DIR/manifest.json                     names the generation that counts, its files and their checksums
//! DIR/step-00000012/shard-00000.safetensors   ranges of tensors, `<name>@<role>`, and where each begins; a rank's further ranges of a
//!                                             tensor are `<name>@<role>~<n>`, and metadata say whose they are
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use fusestep_tensor::{DType, Shape};
use fusestep_tensor_file::{Prepared, TensorBytes, TensorFile};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::OpenRun;
use crate::PlanError;

/// Name of the manifest in its folder.
const MANIFEST: &str = "manifest.json";
/// What every manifest begins with.
const FORMAT: &str = "fusestep-checkpoint";
/// Newest version of the format that is read.
const VERSION: u32 = 2;
/// Version of a checkpoint that is the same for any number of ranks; older programs read it.
const VERSION_CLOSED: u32 = 1;

/// Suffixes of generations of one step.
pub(crate) const TURNS: [&str; 2] = ["a", "b"];

/// What a checkpoint holds, and in which files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `fusestep-checkpoint`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// The update rule.
    pub optimizer: String,
    /// Steps run.
    pub step: u64,
    /// Steps skipped.
    pub skipped: u64,
    /// The loss scale and its counters of good and bad steps, if the loss is scaled.
    pub loss_scale: Option<(f64, u32, u32)>,
    /// Parameters that have missed steps, and the steps they have taken.
    pub steps_of: BTreeMap<String, u64>,
    /// What belongs to single ranks, if there is any; version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<OpenRun>,
    /// Texts of the caller's: where in its data it was.
    pub caller: BTreeMap<String, String>,
    /// Whole tensors, `<name>@<role>`.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// The folder of this generation's files.
    pub generation: String,
    /// Its files.
    pub shards: Vec<ShardSpec>,
}

/// A whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Shape,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSpec {
    /// Name in the generation's folder.
    pub file: String,
    /// Length in bytes.
    pub len_bytes: u64,
    /// xxh3 of all bytes, in hexadecimal.
    pub xxh3: String,
}

/// Consecutive elements of a tensor, as they go to a file.
#[derive(Clone, Debug)]
pub(crate) struct PieceBytes {
    /// `<name>@<role>`.
    pub(crate) tensor: String,
    pub(crate) dtype: DType,
    pub(crate) first: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The tensors of a checkpoint, whole.
pub type WholeTensors = BTreeMap<String, Vec<u8>>;

impl Manifest {
    /// Reads the manifest of a checkpoint.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if there is none, or it is damaged or of a newer version.
    pub fn read(folder: &Path) -> Result<Self, PlanError> {
        let path = folder.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|error| {
            let expected =
                "a manifest, which is written last; without it a checkpoint is not complete";
            refuse(&path, "manifest", expected, error.to_string())
        })?;
        // Version first: a newer format need not have the fields that this one has.
        let value: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| refuse(&path, "manifest", "JSON", error.to_string()))?;
        if value["format"] != FORMAT {
            return Err(refuse(&path, "format", FORMAT, value["format"].to_string()));
        }
        let newest = u64::from(VERSION);
        if value["version"]
            .as_u64()
            .is_none_or(|version| version > newest)
        {
            let expected = format!("at most {newest}; use a newer fusestep");
            return Err(refuse(
                &path,
                "version",
                &expected,
                value["version"].to_string(),
            ));
        }
        let manifest: Self = serde_json::from_value(value).map_err(|error| {
            refuse(
                &path,
                "manifest",
                "the fields of a known version",
                error.to_string(),
            )
        })?;
        let plain =
            |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
        let shards = manifest.shards.iter().map(|shard| &shard.file);
        match std::iter::once(&manifest.generation)
            .chain(shards)
            .find(|name| !plain(name))
        {
            Some(name) => Err(refuse(
                &path,
                "file name",
                "a name within the folder",
                format!("{name:?}"),
            )),
            None => Ok(manifest),
        }
    }

    /// Says what belongs to single ranks, which programs of version 1 would not look for.
    pub(crate) fn set_open(&mut self, open: OpenRun) {
        (self.open, self.version) = (Some(open), VERSION);
    }

    /// A manifest without files.
    pub(crate) fn new(optimizer: String, step: u64) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION_CLOSED,
            optimizer,
            step,
            skipped: 0,
            loss_scale: None,
            steps_of: BTreeMap::new(),
            open: None,
            caller: BTreeMap::new(),
            tensors: BTreeMap::new(),
            generation: String::new(),
            shards: Vec::new(),
        }
    }

    /// Makes this the manifest that counts, then removes files of others.
    pub(crate) fn commit(&self, folder: &Path) -> Result<(), PlanError> {
        // The generation's own name must be on disk before anything refers to it.
        sync_folder(folder)?;
        let path = folder.join(MANIFEST);
        let text = serde_json::to_vec_pretty(self).map_err(|error| {
            refuse(
                &path,
                "manifest",
                "values that JSON can hold",
                error.to_string(),
            )
        })?;
        Prepared::bytes(&path, &text)?.commit()?;
        // What is left behind if this fails costs space, not correctness.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("step-") && *name != *self.generation {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        Ok(())
    }

    /// Reads every file, compares it with its checksum and puts the tensors together.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming the file, and the tensor where it can be told, that is missing, damaged or foreign.
    /// # Cost
    /// The whole checkpoint in memory, once for the files being read and once for the tensors.
    pub fn read_tensors(&self, folder: &Path) -> Result<WholeTensors, PlanError> {
        let folder = folder.join(&self.generation);
        self.check_lengths(&folder)?;
        let mut whole = WholeTensors::new();
        let mut filled: HashMap<&str, u64> = HashMap::new();
        for shard in &self.shards {
            let path = folder.join(&shard.file);
            let file = read_shard(&path, shard)?;
            for (name, entry) in file.entries() {
                let tensor = file.metadata().get(&tensor_key(name)).unwrap_or(name);
                let Some((tensor, spec)) = self.tensors.get_key_value(tensor) else {
                    return Err(refuse(
                        &path,
                        name,
                        "a tensor of the manifest",
                        "another".to_owned(),
                    ));
                };
                let expected = format!("{} {}", spec.dtype, spec.shape);
                if entry.element_type() != Some(spec.dtype) {
                    return Err(refuse(&path, name, &expected, entry.dtype_name()));
                }
                let width = spec.dtype.len_bytes();
                let bytes = file.bytes(name).unwrap_or_default();
                let first = file
                    .metadata()
                    .get(&first_key(name))
                    .and_then(|text| text.parse().ok());
                let first: u64 = first.unwrap_or(0);
                let numel = (bytes.len() / width) as u64;
                let end = first
                    .checked_add(numel)
                    .filter(|&end| end <= spec.shape.numel());
                let Some(end) = end else {
                    let found = format!("{numel} elements from {first} on");
                    return Err(refuse(&path, name, &expected, found));
                };
                let len_bytes = spec.shape.numel() as usize * width;
                let place = whole
                    .entry(tensor.clone())
                    .or_insert_with(|| vec![0; len_bytes]);
                place[first as usize * width..end as usize * width].copy_from_slice(bytes);
                *filled.entry(tensor).or_default() += numel;
            }
        }
        for (name, spec) in &self.tensors {
            let found = filled.get(name.as_str()).copied().unwrap_or(0);
            let expected = spec.shape.numel();
            if found != expected {
                let expected = format!("{expected} elements in all shards");
                return Err(refuse(&folder, name, &expected, format!("{found}")));
            }
            whole.entry(name.clone()).or_default();
        }
        Ok(whole)
    }

    /// Compares lengths with the files that are there, so that a manifest cannot ask for more memory than they take on disk.
    fn check_lengths(&self, folder: &Path) -> Result<(), PlanError> {
        let mut on_disk = 0u64;
        for shard in &self.shards {
            let path = folder.join(&shard.file);
            let found = fs::metadata(&path)
                .map_err(|error| {
                    refuse(&path, "shard", "a file of the manifest", error.to_string())
                })?
                .len();
            if found != shard.len_bytes {
                let expected = format!("{} bytes", shard.len_bytes);
                return Err(refuse(&path, "length", &expected, found.to_string()));
            }
            on_disk = on_disk.saturating_add(found);
        }
        let needed = self.tensors.values().try_fold(0u64, |sum, spec| {
            let len_bytes = spec
                .shape
                .numel()
                .checked_mul(spec.dtype.len_bytes() as u64)?;
            sum.checked_add(len_bytes)
        });
        match needed {
            Some(needed) if needed <= on_disk => Ok(()),
            _ => {
                let expected = format!("tensors of at most the {on_disk} bytes of all files");
                Err(refuse(
                    folder,
                    "tensors",
                    &expected,
                    "longer ones".to_owned(),
                ))
            }
        }
    }

    /// Writes the same tensors again as a checkpoint of `count` files.
    ///
    /// # Errors
    /// As [`Self::read_tensors`]; [`PlanError::File`].
    pub fn reshard(&self, from: &Path, to: &Path, count: usize) -> Result<Self, PlanError> {
        let whole = self.read_tensors(from)?;
        self.write_whole(&whole, to, count)
    }

    /// Writes tensors as a checkpoint of `count` files.
    pub(crate) fn write_whole(
        &self,
        whole: &WholeTensors,
        to: &Path,
        count: usize,
    ) -> Result<Self, PlanError> {
        let mut manifest = self.clone();
        manifest.generation = generation(self.step, free_turn(to, self.step));
        manifest.shards.clear();
        for shard in 0..count as u64 {
            let mut pieces = Vec::new();
            for (name, spec) in &self.tensors {
                let (numel, count) = (spec.shape.numel(), count as u64);
                let bound = |at: u64| at * (numel / count) + at.min(numel % count);
                let (first, end) = (bound(shard), bound(shard + 1));
                let width = spec.dtype.len_bytes();
                let bytes = whole.get(name).map_or(&[][..], Vec::as_slice);
                pieces.push(PieceBytes {
                    tensor: name.clone(),
                    dtype: spec.dtype,
                    first,
                    bytes: bytes[first as usize * width..end as usize * width].to_vec(),
                });
            }
            let spec = write_shard(to, &manifest.generation, shard as usize, &pieces)?;
            manifest.shards.push(spec);
        }
        manifest.commit(to)?;
        Ok(manifest)
    }
}

/// The folder's name of a generation; `turn` keeps two saves of one step apart.
pub(crate) fn generation(step: u64, turn: &str) -> String {
    format!("step-{step:08}-{turn}")
}

/// `a`, unless the checkpoint in the folder is that turn of this step: files that count are never written over.
pub(crate) fn free_turn(folder: &Path, step: u64) -> &'static str {
    match Manifest::read(folder) {
        Ok(manifest) if manifest.generation == generation(step, TURNS[0]) => TURNS[1],
        _ => TURNS[0],
    }
}

pub(crate) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:05}.safetensors")
}

/// Writes one file of a generation, synced.
pub(crate) fn write_shard(
    folder: &Path,
    generation: &str,
    shard: usize,
    pieces: &[PieceBytes],
) -> Result<ShardSpec, PlanError> {
    let within = folder.join(generation);
    fs::create_dir_all(&within).map_err(|error| {
        refuse(
            &within,
            "folder",
            "one that can be written",
            error.to_string(),
        )
    })?;
    let path = within.join(shard_file(shard));
    let mut metadata = HashMap::new();
    let mut tensors = Vec::with_capacity(pieces.len());
    let mut names: HashSet<String> = pieces.iter().map(|piece| piece.tensor.clone()).collect();
    let mut known = HashSet::new();
    for piece in pieces {
        // A rank may have several ranges of one tensor: behind the first they have names of their own.
        let mut name = piece.tensor.clone();
        if !known.insert(&piece.tensor) {
            let free = (1..).map(|at| format!("{}~{at}", piece.tensor));
            name = free
                .into_iter()
                .find(|name| !names.contains(name))
                .unwrap_or(name);
            names.insert(name.clone());
            metadata.insert(tensor_key(&name), piece.tensor.clone());
        }
        metadata.insert(first_key(&name), piece.first.to_string());
        metadata.insert(sum_key(&name), checksum(&piece.bytes));
        let numel = (piece.bytes.len() / piece.dtype.len_bytes()) as u64;
        let shape = Shape::new([numel])?;
        let bytes = TensorBytes::of(piece.dtype, &shape, Cow::Borrowed(&piece.bytes));
        tensors.push((name, bytes));
    }
    Prepared::tensors(&path, &tensors, metadata)?.commit()?;
    let bytes = read_bytes(&path)?;
    Ok(ShardSpec {
        file: shard_file(shard),
        len_bytes: bytes.len() as u64,
        xxh3: checksum(&bytes),
    })
}

/// A file whose bytes are those of the manifest.
fn read_shard(path: &Path, spec: &ShardSpec) -> Result<TensorFile, PlanError> {
    let bytes = read_bytes(path)?;
    if bytes.len() as u64 != spec.len_bytes {
        let expected = format!("{} bytes", spec.len_bytes);
        return Err(refuse(path, "length", &expected, bytes.len().to_string()));
    }
    let found = checksum(&bytes);
    if found == spec.xxh3 {
        return Ok(TensorFile::parse(path, bytes)?);
    }
    // Only to say which tensor it is.
    let file = TensorFile::parse(path, bytes);
    let damaged = file.as_ref().ok().and_then(|file| {
        let damaged = |name: &&String| {
            let sum = file.metadata().get(&sum_key(name));
            sum.is_none_or(|sum| *sum != checksum(file.bytes(name).unwrap_or_default()))
        };
        file.entries().keys().find(damaged).cloned()
    });
    let what = damaged.unwrap_or_else(|| "header".to_owned());
    Err(refuse(
        path,
        &what,
        &format!("checksum {}", spec.xxh3),
        found,
    ))
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, PlanError> {
    fs::read(path)
        .map_err(|error| refuse(path, "shard", "a file of the manifest", error.to_string()))
}

fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

fn first_key(tensor: &str) -> String {
    format!("first@{tensor}")
}

fn tensor_key(entry: &str) -> String {
    format!("tensor@{entry}")
}

fn sum_key(tensor: &str) -> String {
    format!("xxh3@{tensor}")
}

fn sync_folder(folder: &Path) -> Result<(), PlanError> {
    let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| {
        refuse(
            folder,
            "folder",
            "one that can be synced",
            error.to_string(),
        )
    })
}

pub(crate) fn refuse(path: &Path, what: &str, expected: &str, found: String) -> PlanError {
    PlanError::Checkpoint {
        path: PathBuf::from(path).display().to_string(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found,
    }
}
