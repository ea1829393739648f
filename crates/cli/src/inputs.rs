//! Parameter descriptors from files.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use fusestep_tensor::{DType, ParamDesc, Quoted, Shape};
use fusestep_tensor_file::{Disk, Files, TensorFile, TensorFileError};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// One entry of a shapes file: `[{"name": "fc.weight", "shape": [10, 64]}, …]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapeEntry {
    name: String,
    shape: Vec<u64>,
    dtype: Option<String>,
}

/// An entry that is an object: what is derived takes its values in an array, too.
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

/// Parameters of a model, and what else was in its file.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) params: Vec<ParamDesc>,
    /// Names of tensors that are not floating point and so no parameters.
    pub(crate) buffers: Vec<String>,
}

/// Reads a `.json` file of shapes or a safetensors file; `dtype` is that of shapes without their
/// own.
pub(crate) fn read_model(path: &Path, dtype: DType) -> anyhow::Result<Model> {
    if path.extension().and_then(OsStr::to_str) == Some("json") {
        let named = || path.display().to_string();
        let params = parse_shapes(path, &Disk.read(path).with_context(named)?, dtype)?;
        return Ok(Model { params, buffers: Vec::new() });
    }
    let file = TensorFile::read(path).map_err(|error| match error {
        // What a text looks like to whoever expects a header's length.
        TensorFileError::HeaderTooLong { .. } | TensorFileError::Length { .. } => {
            anyhow!("{error}; shapes are read from a file whose name ends in .json")
        }
        error => error.into(),
    })?;
    model_of(&file)
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

/// An element type that parameters can have.
fn parameter_dtype(name: &str) -> Option<DType> {
    let found = name.parse().ok();
    found.filter(|dtype| matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16))
}

/// Checks the text of a shapes file that was read from `path`.
pub(crate) fn parse_shapes(
    path: &Path,
    text: &[u8],
    dtype: DType,
) -> anyhow::Result<Vec<ParamDesc>> {
    let parsed: Result<Vec<Object>, _> = serde_json::from_slice(text);
    let entries = parsed.map_err(|error| {
        // Its text quotes what it found, of any length.
        let (path, error) = (path.display(), error.to_string());
        let error = Quoted(&error);
        anyhow!("{path}: expected [{{\"name\": …, \"shape\": […]}}, …]: {error}")
    })?;
    let mut params = Vec::with_capacity(entries.len());
    for Object(entry) in entries {
        let shape = Shape::new(entry.shape)
            .with_context(|| format!("{}: `{}`", path.display(), Quoted(&entry.name)))?;
        let dtype = match &entry.dtype {
            Some(found) => parameter_dtype(found).with_context(|| {
                format!(
                    "{}: `{}`: expected f32, f64, f16 or bf16, found dtype `{}`",
                    path.display(),
                    Quoted(&entry.name),
                    Quoted(found)
                )
            })?,
            None => dtype,
        };
        params.push(ParamDesc::new(entry.name, shape, dtype));
    }
    Ok(params)
}
