//! Parameter descriptors from files.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use fusestep_checkpoint::{MODEL_FILE, Manifest};
use fusestep_tensor::{DType, ParamDesc, Quoted, Shape};
use fusestep_tensor_file::{Disk, Files, TensorFile, TensorFileError, object_entries};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::output::note;

/// One entry of a shapes file: `[{"name": "fc.weight", "shape": [10, 64]}, …]`, or of a map
/// `{"fc.weight": [10, 64], …}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapeEntry {
    name: String,
    shape: Vec<u64>,
    dtype: Option<String>,
}

/// An entry that must be an object: a derived `Deserialize` takes the values in an array, too.
#[derive(Debug)]
struct Object(ShapeEntry);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor).map(Self)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = ShapeEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object such as {\"name\": \"fc.weight\", \"shape\": [10, 64]}")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ShapeEntry, A::Error> {
        ShapeEntry::deserialize(MapAccessDeserializer::new(map))
    }
}

/// Parameters of a model, and the other tensors of its file.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) params: Vec<ParamDesc>,
    /// Names of tensors that are not floating point and so no parameters.
    pub(crate) buffers: Vec<String>,
}

/// The file of a checkpoint that has its parameters whole.
fn file_of_checkpoint(folder: &Path) -> anyhow::Result<PathBuf> {
    let manifest = Manifest::read_if_any(folder)?.with_context(|| {
        format!(
            "{}: expected a model, or the folder of a checkpoint, found a folder without a \
             manifest.json; name a file in it",
            folder.display()
        )
    })?;
    let file = folder.join(&manifest.generation).join(MODEL_FILE);
    ensure!(
        file.is_file(),
        "{}: expected a checkpoint of whole parameters, found one without {MODEL_FILE}; each rank \
         has a slice of its own",
        folder.display()
    );
    Ok(file)
}

/// Reads a `.json` file of shapes, a safetensors file, or the files that an index names. `dtype` is
/// for shapes that state none. Of a checkpoint's folder it reads the whole
/// parameters, and says from which file.
///
/// # Errors
/// The fault of a file; a `dtype` where every tensor has its own.
pub(crate) fn read_model(path: &Path, dtype: Option<DType>) -> anyhow::Result<Model> {
    if path.is_dir() {
        let file = file_of_checkpoint(path)?;
        note(&format!(
            "note: {} is a checkpoint; its parameters are in {}",
            path.display(),
            file.display()
        ));
        return read_model(&file, dtype);
    }
    let (model, takes_dtype) = if path.extension().and_then(OsStr::to_str) == Some("json") {
        let named = || path.display().to_string();
        let text = Disk.read(path).with_context(named)?;
        match files_of_index(path, &text)? {
            Some(files) => (model_of_index(path, &files)?, false),
            None => {
                let read = parse_shapes(path, &text, dtype.unwrap_or(DType::F32))?;
                (Model { params: read.params, buffers: Vec::new() }, read.takes_dtype)
            }
        }
    } else {
        let file = TensorFile::read(path).map_err(|error| match error {
            // A text looks like this to a reader that expects a header's length.
            TensorFileError::HeaderTooLong { .. } | TensorFileError::Length { .. } => {
                anyhow!("{error}; shapes are read from a file whose name ends in .json")
            }
            error => error.into(),
        })?;
        (model_of(&file)?, false)
    };
    if let Some(dtype) = dtype.filter(|_| !takes_dtype) {
        bail!(
            "--dtype: expected shapes without a dtype of their own, found one for every tensor in \
             {}; leave --dtype {dtype} out",
            path.display()
        );
    }
    Ok(model)
}

/// The tensors of each file that a safetensors index names; `None` if the text is no index.
fn files_of_index(
    path: &Path,
    text: &[u8],
) -> anyhow::Result<Option<BTreeMap<String, BTreeSet<String>>>> {
    let entries = std::str::from_utf8(text).ok().and_then(object_entries).unwrap_or_default();
    // A tensor of this name has a list.
    let map = entries.iter().find(|(name, map)| name == "weight_map" && map.starts_with('{'));
    let Some((_, map)) = map else {
        return Ok(None);
    };
    let map: BTreeMap<String, String> = serde_json::from_str(map).map_err(|error| {
        let error = error.to_string();
        let (path, error) = (path.display(), Quoted(&error));
        anyhow!("{path}: weight_map: expected {{\"tensor\": \"file\", …}}: {error}")
    })?;
    let mut files = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, file) in map {
        ensure!(
            Path::new(&file).file_name() == Some(OsStr::new(&file)),
            "{}: `{}`: expected the name of a file beside the index, found `{}`",
            path.display(),
            Quoted(&name),
            Quoted(&file)
        );
        files.entry(file).or_default().insert(name);
    }
    Ok(Some(files))
}

/// The descriptors of all files that an index names, in name order.
fn model_of_index(
    path: &Path,
    files: &BTreeMap<String, BTreeSet<String>>,
) -> anyhow::Result<Model> {
    let (mut params, mut buffers) = (Vec::new(), Vec::new());
    for (file, names) in files {
        let file = TensorFile::read(&path.with_file_name(file))?;
        if let Some(name) = names.iter().find(|name| !file.entries().contains_key(*name)) {
            bail!(
                "{}: `{}`: expected the tensor in {}, found none of this name there",
                path.display(),
                Quoted(name),
                file.path().display()
            );
        }
        let of_file = model_of(&file)?;
        params.extend(of_file.params.into_iter().filter(|param| names.contains(&param.name)));
        buffers.extend(of_file.buffers.into_iter().filter(|name| names.contains(name)));
    }
    params.sort_by(|a, b| a.name.cmp(&b.name));
    buffers.sort();
    Ok(Model { params, buffers })
}

/// The descriptors of a file's tensors, in name order.
pub(crate) fn model_of(file: &TensorFile) -> anyhow::Result<Model> {
    let (mut params, mut buffers) = (Vec::new(), Vec::new());
    for (name, entry) in file.entries() {
        match entry.element_type() {
            Some(dtype @ (DType::F32 | DType::F64 | DType::F16 | DType::BF16)) => {
                params.push(ParamDesc::new(name, entry.shape.clone(), dtype));
            }
            Some(_) => buffers.push(name.clone()),
            None if matches!(
                entry.dtype_name().as_str(),
                "bool" | "i8" | "i16" | "u16" | "u32" | "u64"
            ) =>
            {
                buffers.push(name.clone());
            }
            None => bail!(
                "{}: `{}`: expected f32, f64, f16 or bf16, found {}; cast the tensor",
                file.path().display(),
                Quoted(name),
                entry.dtype_name()
            ),
        }
    }
    Ok(Model { params, buffers })
}

/// The names of parameters' dtypes; without parameters, the dtype that they would have.
pub(crate) fn dtype_names(params: &[ParamDesc], dtype: Option<DType>) -> String {
    let mut names: Vec<&str> = params.iter().map(|param| param.dtype.name()).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        dtype.unwrap_or(DType::F32).name().to_owned()
    } else {
        names.join(" and ")
    }
}

/// Reads an element type that parameters can have.
fn parameter_dtype(name: &str) -> Option<DType> {
    let found = name.parse().ok();
    found.filter(|dtype| matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16))
}

/// Contents of a shapes file.
#[derive(Debug)]
pub(crate) struct Shapes {
    pub(crate) params: Vec<ParamDesc>,
    /// Whether there are no tensors, or one of them has no dtype of its own.
    takes_dtype: bool,
}

/// Checks the text of a shapes file that was read from `path`: a list of named shapes, or a map of
/// names to extents, each in the text's order.
pub(crate) fn parse_shapes(path: &Path, text: &[u8], dtype: DType) -> anyhow::Result<Shapes> {
    let entries = match std::str::from_utf8(text).ok().and_then(object_entries) {
        Some(entries) => shapes_of_map(path, entries)?,
        None => {
            let parsed: Result<Vec<Object>, _> = match text.trim_ascii_start().first() {
                // A map with a fault, which reads as no map.
                Some(b'{') => {
                    serde_json::from_slice::<BTreeMap<String, Vec<u64>>>(text).map(|_| Vec::new())
                }
                _ => serde_json::from_slice(text),
            };
            let parsed = parsed.map_err(|error| unlike_shapes(path, &error))?;
            parsed.into_iter().map(|Object(entry)| entry).collect()
        }
    };
    let takes_dtype = entries.is_empty() || entries.iter().any(|entry| entry.dtype.is_none());
    let mut params = Vec::with_capacity(entries.len());
    for entry in entries {
        let shape = Shape::new(entry.shape)
            .with_context(|| format!("{}: `{}`", path.display(), Quoted(&entry.name)))?;
        let dtype = match &entry.dtype {
            Some(found) => parameter_dtype(found).with_context(|| {
                format!(
                    "{}: `{}`: expected f32, f64, f16 or bf16, found dtype `{}`; write one of them, \
                     or leave the dtype out and give --dtype",
                    path.display(),
                    Quoted(&entry.name),
                    Quoted(found)
                )
            })?,
            None => dtype,
        };
        params.push(ParamDesc::new(entry.name, shape, dtype));
    }
    Ok(Shapes { params, takes_dtype })
}

/// A refusal of a text that holds no shapes, by its line.
fn unlike_shapes(path: &Path, error: &serde_json::Error) -> anyhow::Error {
    let (path, line) = (path.display(), error.line().max(1));
    let expected = "expected [{\"name\": …, \"shape\": […]}, …] or {\"name\": […], …}";
    if error.is_eof() {
        return anyhow!(
            "{path}:{line}: {expected}, found the end of the file in the middle of it; write the \
             file again, whole"
        );
    }
    // The error's text quotes its input, of any length.
    anyhow!("{path}:{line}: {expected}: {}", Quoted(&error.to_string()))
}

/// The entries of a map of names to extents.
fn shapes_of_map(path: &Path, map: Vec<(Cow<'_, str>, &str)>) -> anyhow::Result<Vec<ShapeEntry>> {
    let entries = map.into_iter().map(|(name, value)| {
        let shape: Vec<u64> = serde_json::from_str(value).map_err(|_| {
            anyhow!(
                "{}: `{}`: expected a list of extents such as [10, 64], found {}",
                path.display(),
                Quoted(&name),
                Quoted(value)
            )
        })?;
        Ok(ShapeEntry { name: name.into_owned(), shape, dtype: None })
    });
    entries.collect()
}
