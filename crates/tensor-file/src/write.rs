//! Writing, all or nothing.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fusestep_tensor::{DType, Shape};
use safetensors::{Dtype, View};

use crate::TensorFileError;

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct TensorBytes<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> TensorBytes<'a> {
    /// A tensor of one of fusestep's own dtypes.
    pub fn of(dtype: DType, shape: &Shape, bytes: Cow<'a, [u8]>) -> Self {
        let dtype = match dtype {
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I32 => Dtype::I32,
            DType::I64 => Dtype::I64,
            DType::U8 => Dtype::U8,
            DType::U16 => Dtype::U16,
        };
        Self {
            dtype,
            shape: shape.dims().iter().map(|&dim| dim as usize).collect(),
            bytes,
        }
    }
}

impl View for &TensorBytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Refuses a path that [`write_atomically`] could not write, before work is spent on what it is to hold.
///
/// # Errors
/// [`TensorFileError::NotAFile`] for a folder or device, [`TensorFileError::Io`] if its folder is missing or cannot be written.
pub fn check_writable(path: &Path) -> Result<(), TensorFileError> {
    temporary(path).map(drop)
}

/// A file that is complete on disk beside the place it is for; dropped without [`Prepared::commit`] it is removed.
///
/// Several files that belong together are all prepared before the first is committed.
#[derive(Debug)]
pub struct Prepared {
    path: PathBuf,
    file: tempfile::NamedTempFile,
}

impl Prepared {
    /// Writes and syncs a file of tensors beside `path`.
    ///
    /// # Errors
    /// [`TensorFileError`]; whatever is at `path` is untouched.
    /// # Cost
    /// One copy of the tensors in memory.
    pub fn tensors(
        path: &Path,
        tensors: &[(String, TensorBytes<'_>)],
        metadata: HashMap<String, String>,
    ) -> Result<Self, TensorFileError> {
        let views = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let metadata = (!metadata.is_empty()).then_some(metadata);
        let bytes =
            safetensors::serialize(views, metadata).map_err(|error| TensorFileError::Write {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
        Self::bytes(path, &bytes)
    }

    /// Writes and syncs any file beside `path`.
    ///
    /// # Errors
    /// [`TensorFileError`]; whatever is at `path` is untouched.
    pub fn bytes(path: &Path, bytes: &[u8]) -> Result<Self, TensorFileError> {
        let mut file = temporary(path)?;
        file.write_all(bytes).map_err(io_error(path, "write"))?;
        file.as_file().sync_all().map_err(io_error(path, "sync"))?;
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Renames the file over its place and syncs the folder.
    ///
    /// # Errors
    /// [`TensorFileError::Io`]; whatever was at the place is still there then.
    pub fn commit(self) -> Result<(), TensorFileError> {
        let path = &self.path;
        self.file
            .persist(path)
            .map_err(|error| io_error(path, "replace")(error.error))?;
        // The rename itself is only durable once the folder is.
        File::open(folder(path))
            .and_then(|folder| folder.sync_all())
            .map_err(io_error(path, "sync its folder"))
    }
}

/// Writes a file of tensors: into a temporary file beside `path`, synced, then renamed over it, and the folder synced.
///
/// # Errors
/// [`TensorFileError`]; whatever was at `path` is still there, and the temporary file is removed.
/// # Cost
/// One copy of the tensors in memory.
pub fn write_atomically(
    path: &Path,
    tensors: &[(String, TensorBytes<'_>)],
    metadata: HashMap<String, String>,
) -> Result<(), TensorFileError> {
    Prepared::tensors(path, tensors, metadata)?.commit()
}

fn io_error(path: &Path, operation: &'static str) -> impl FnOnce(io::Error) -> TensorFileError {
    move |error| TensorFileError::Io {
        path: path.to_owned(),
        operation,
        reason: error.to_string(),
    }
}

/// A temporary file beside `path`, with the mode that an ordinary new file has.
fn temporary(path: &Path) -> Result<tempfile::NamedTempFile, TensorFileError> {
    match fs::metadata(path) {
        Ok(kind) if kind.is_dir() => return Err(not_a_file(path, "a folder")),
        Ok(kind) if !kind.is_file() => return Err(not_a_file(path, "a device or pipe")),
        _ if path.file_name().is_none() => return Err(not_a_file(path, "a path without a name")),
        _ => {}
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".fusestep-").suffix(".part");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder
        .tempfile_in(folder(path))
        .map_err(without_temporary_name)
        .map_err(io_error(path, "create a file in its folder"))
}

fn not_a_file(path: &Path, found: &'static str) -> TensorFileError {
    TensorFileError::NotAFile {
        path: path.to_owned(),
        found,
    }
}

/// The system's reason without the random name of the temporary file.
fn without_temporary_name(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::from(error.kind()),
    }
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorFile;

    fn tensors(value: u8) -> Vec<(String, TensorBytes<'static>)> {
        let tensor = TensorBytes {
            dtype: Dtype::F32,
            shape: vec![2],
            bytes: Cow::Owned(vec![value; 8]),
        };
        vec![("a".into(), tensor)]
    }

    #[test]
    fn what_is_written_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        for value in [1, 2] {
            let metadata = HashMap::from([("step".to_owned(), value.to_string())]);
            write_atomically(&path, &tensors(value), metadata).unwrap();
            let read = TensorFile::read(&path).unwrap();
            assert_eq!(read.bytes("a").unwrap(), [value; 8]);
            assert_eq!(read.metadata()["step"], value.to_string());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_refused_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        write_atomically(&path, &tensors(1), HashMap::new()).unwrap();
        let mut wrong = tensors(2);
        wrong[0].1.shape = vec![3];
        assert!(write_atomically(&path, &wrong, HashMap::new()).is_err());
        assert_eq!(TensorFile::read(&path).unwrap().bytes("a").unwrap(), [1; 8]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let below_a_file = path.join("x");
        for bad in [folder.path(), Path::new("/no/such/folder/x"), &below_a_file] {
            assert!(check_writable(bad).is_err(), "{}", bad.display());
            assert!(write_atomically(bad, &tensors(1), HashMap::new()).is_err());
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_mode_is_that_of_an_ordinary_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("ours"), folder.path().join("plain"));
        write_atomically(&ours, &tensors(1), HashMap::new()).unwrap();
        fs::write(&plain, b"x").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }
}
