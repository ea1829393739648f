//! Reading of files of tensors.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use fusestep_tensor::{DType, Shape};
use safetensors::{Dtype, SafeTensors};

use crate::error::io_error;
use crate::{Disk, FileKind, Files, TensorBytes, TensorFileError, diagnose, object_entries};

/// A tensor of a file: its dtype, shape and place.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// The element type, as the format's library names it.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Shape,
    range: Range<usize>,
}

impl TensorEntry {
    /// The element type, if fusestep has it.
    pub fn element_type(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F64 => Some(DType::F64),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::I32 => Some(DType::I32),
            Dtype::I64 => Some(DType::I64),
            Dtype::U8 => Some(DType::U8),
            Dtype::U16 => Some(DType::U16),
            _ => None,
        }
    }

    /// A tensor of this dtype and shape with other bytes, to be written.
    pub fn with_bytes<'a>(&self, bytes: &'a [u8]) -> TensorBytes<'a> {
        TensorBytes {
            dtype: self.dtype,
            shape: self.shape.dims().iter().map(|&dim| dim as usize).collect(),
            bytes: bytes.into(),
        }
    }

    /// The element type as the file spells it, in lower case.
    pub fn dtype_name(&self) -> String {
        format!("{:?}", self.dtype).to_lowercase()
    }
}

/// A whole file in memory, checked: names are unique, and the tensors cover the data without gap or
/// overlap.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: Vec<u8>,
    data_start: usize,
    entries: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

/// Name of the file that says which folder of a checkpoint counts.
const MANIFEST: &str = "manifest.json";

/// The whole parameters of the checkpoint in a folder, if its manifest names a folder that has
/// them.
fn model_of_checkpoint(files: &dyn Files, folder: &Path) -> Option<PathBuf> {
    let manifest = files.read(&folder.join(MANIFEST)).ok()?;
    let entries = object_entries(std::str::from_utf8(&manifest).ok()?)?;
    let (_, generation) = entries.into_iter().find(|(key, _)| key == "generation")?;
    let name = generation.strip_prefix('"')?.strip_suffix('"')?;
    let model = folder.join(name).join("model.safetensors");
    // A name that leads out of the folder is none that a checkpoint has.
    let is_within = Path::new(name).file_name() == Some(name.as_ref());
    (is_within && files.kind(&model).is_ok()).then_some(model)
}

impl TensorFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`TensorFileError`], which names the file, the faulty tensor if there is one, and the
    /// expected and found values.
    /// # Cost
    /// Memory for the whole file. Reading copies instead of mapping, so that another program that
    /// changes the file cannot change a tensor.
    pub fn read(path: &Path) -> Result<Self, TensorFileError> {
        Self::read_in(&Disk, path)
    }

    /// [`TensorFile::read`] in any file system.
    ///
    /// # Errors
    /// As [`TensorFile::read`].
    pub fn read_in(files: &dyn Files, path: &Path) -> Result<Self, TensorFileError> {
        let not_a_file = |found| TensorFileError::NotAFile { path: path.to_owned(), found };
        match files.kind(path).map_err(io_error(path, "open"))? {
            FileKind::Folder if files.kind(&path.join(MANIFEST)).is_ok() => {
                let place = model_of_checkpoint(files, path);
                let place = place.map_or_else(
                    || "model.safetensors in the folder that manifest.json names".to_owned(),
                    |place| place.display().to_string(),
                );
                let found = format!("a folder with a checkpoint; its parameters are {place}");
                Err(not_a_file(found.into()))
            }
            FileKind::Folder => Err(not_a_file("a folder".into())),
            FileKind::Other => Err(not_a_file("a pipe, socket or device".into())),
            FileKind::File { .. } => {
                Self::parse(path, files.read(path).map_err(io_error(path, "read"))?)
            }
        }
    }

    /// Checks bytes that were read from `path`.
    ///
    /// # Errors
    /// As [`TensorFile::read`].
    pub fn parse(path: &Path, bytes: Vec<u8>) -> Result<Self, TensorFileError> {
        let header = diagnose::header(path, &bytes)?;
        let data_start = 8 + header.len();
        let entries = diagnose::entries(path, header)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| {
            let data_bytes = (bytes.len() - data_start) as u64;
            let found = diagnose::tensors(path, &entries, data_bytes);
            found.unwrap_or_else(|| TensorFileError::Header {
                path: path.to_owned(),
                reason: error.to_string(),
            })
        })?;
        let mut found = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let dims: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
            let shape = Shape::new(dims)
                .map_err(|source| TensorFileError::Shape { path: path.to_owned(), source })?;
            let (begin, end) = info.data_offsets;
            let entry = TensorEntry {
                dtype: info.dtype,
                shape,
                range: data_start + begin..data_start + end,
            };
            found.insert(name, entry);
        }
        Ok(Self {
            path: path.to_owned(),
            data_start,
            entries: found,
            metadata: metadata.metadata().clone().unwrap_or_default(),
            bytes,
        })
    }

    /// The path that the file was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name.
    pub fn entries(&self) -> &BTreeMap<String, TensorEntry> {
        &self.entries
    }

    /// A tensor's bytes, little-endian.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let entry = self.entries.get(name)?;
        self.bytes.get(entry.range.clone())
    }

    /// The texts about the file.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Bytes of all tensors together.
    pub fn data_bytes(&self) -> usize {
        self.bytes.len() - self.data_start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        bytes
    }

    fn refusal(bytes: Vec<u8>) -> String {
        let error = TensorFile::parse(Path::new("x.safetensors"), bytes).unwrap_err();
        error.to_string()
    }

    fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    }

    #[test]
    fn a_good_file_is_read() {
        let header = format!(
            r#"{{"__metadata__":{{"step":"3"}},{},{}}}"#,
            entry("b", "F64", "[0,4]", 12, 12),
            entry("a", "F32", "[3]", 0, 12)
        );
        let read = TensorFile::parse(Path::new("x"), file(&header, 12)).unwrap();
        assert_eq!(read.bytes("a").unwrap().len(), 12);
        assert_eq!(read.entries()["b"].element_type(), Some(DType::F64));
        assert_eq!(read.metadata()["step"], "3");
        assert_eq!(read.data_bytes(), 12);
    }

    #[test]
    fn every_defect_names_the_tensor_and_both_sides() {
        let a = entry("a", "F32", "[3]", 0, 12);
        for (header, data_bytes, message) in [
            (
                format!("{{{a},{}}}", entry("b", "F32", "[2]", 8, 16)),
                16,
                "`b`: data_offsets overlap: expected a begin of 12, where `a` ends, found 8",
            ),
            (
                format!("{{{a},{}}}", entry("b", "F32", "[2]", 16, 24)),
                24,
                "`b`: data_offsets leave a gap: expected a begin of 12, where `a` ends, found 16",
            ),
            (
                format!("{{{}}}", entry("a", "F33", "[3]", 0, 12)),
                12,
                "`a`: dtype: expected a dtype of the safetensors format such as F32, F64, F16 or \
                 BF16, found \"F33\"",
            ),
            (
                format!("{{{}}}", entry("a", "F32", "[4]", 0, 12)),
                12,
                "`a`: shape and data_offsets disagree: expected 16 bytes for shape [4] of \
                 \"F32\", found data_offsets [0, 12]",
            ),
            (format!("{{{a},{a}}}"), 12, "`a`: expected the name once, found it 2 times"),
            (
                format!("{{{a}}}"),
                9,
                "tensor data: expected 12 bytes, found 9; the file is truncated",
            ),
            (format!("{{{a}}}"), 13, "tensor data: expected 12 bytes, found 13"),
            (
                format!("{{{}}}", entry("a", "F32", "[-1]", 0, 12)),
                12,
                "`a`: shape: expected a list of counts, found [-1]",
            ),
            (
                format!("{{{}}}", entry("a", "F32", "[4294967296,4294967296]", 0, 0)),
                0,
                "`a`: shape: expected a length in bytes below 2^61",
            ),
            ("[1]".into(), 0, "header: expected JSON"),
            ("{".into(), 0, "header: expected JSON"),
            (
                r#"{"__metadata__":{"step":3}}"#.into(),
                0,
                "`__metadata__`: metadata: expected an object of texts, found 3",
            ),
        ] {
            let text = refusal(file(&header, data_bytes));
            assert!(text.contains(message), "{text}\nlacks {message}");
        }
    }

    #[test]
    fn descriptions_are_bounded_and_quoted_safely() {
        for (header, data_bytes, message) in [
            (
                format!("{{{}}}", entry("a", "F32", &format!("[1{}]", ",1".repeat(3_000)), 0, 4)),
                4,
                "`a`: description: expected at most 4096 bytes of dtype, shape and data_offsets, \
                 found 6048 bytes",
            ),
            (
                format!("{{{}}}", entry("a", &"F".repeat(3_000), "[3]", 0, 12)),
                12,
                "FFF… (3002 characters)",
            ),
            (format!("{{{}}}", entry("a\\u202e", "F33", "[3]", 0, 12)), 12, "`a\\u{202e}`: dtype"),
        ] {
            let text = refusal(file(&header, data_bytes));
            assert!(text.contains(message), "{text}\nlacks {message}");
        }
    }

    #[test]
    fn lengths_out_of_range_are_refused() {
        assert!(refusal(vec![1; 7]).contains("header length: expected 8 bytes, found 7"));
        assert!(
            refusal(u64::MAX.to_le_bytes().to_vec()).contains("expected at most 100000000 bytes")
        );
        let mut cut = file("{}", 0);
        cut.truncate(9);
        assert!(refusal(cut).contains("header: expected 2 bytes, found 1"));
        let mut text = file("{}", 0);
        text[9] = 0xff;
        assert!(refusal(text).contains("UTF-8"));
        let missing = TensorFile::read(Path::new("/no/such/file")).unwrap_err();
        assert!(missing.to_string().starts_with("/no/such/file: cannot open"));
        let folder = TensorFile::read(Path::new("/")).unwrap_err();
        assert!(folder.to_string().contains("found a folder"));
        let device = TensorFile::read(Path::new("/dev/null")).unwrap_err();
        assert!(device.to_string().contains("pipe, socket or device"));
    }
}
