//! Writing of files, all or nothing.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use fusestep_tensor::{DType, Shape};
use safetensors::{Dtype, View};

use crate::error::io_error;
use crate::journal::{self, Sum};
use crate::serialize::serialize;
use crate::{
    Disk, FileKind, Files, TensorFileError, commit_together, part, place, remove_abandoned_in,
};

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
        Self { dtype, shape: shape.dims().iter().map(|&dim| dim as usize).collect(), bytes }
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

/// Refuses a path that [`write_atomically`] could not write, before work is spent on the content.
///
/// # Errors
/// [`TensorFileError::NotAFile`] for a folder or device, [`TensorFileError::Io`] if its folder is
/// missing or cannot be written, or its name is too long.
pub fn check_writable(path: &Path) -> Result<(), TensorFileError> {
    // Parts of dead processes stay here: the caller may not have finished their commit yet.
    Prepared::within(&Disk, path, checked_target(path)?, &[]).map(drop)
}

/// Refuses paths that [`commit_together`](crate::commit_together) could not write, before work is
/// spent on the contents.
///
/// # Errors
/// Those of [`check_writable`] for each path. For several paths also [`TensorFileError::Write`] if
/// one is not UTF-8, which a journal cannot hold. [`TensorFileError::Io`] if the first is too long
/// for the name of its journal.
pub fn check_writable_together(paths: &[&Path]) -> Result<(), TensorFileError> {
    for path in paths {
        check_writable(path)?;
    }
    let [first, _, ..] = paths else {
        return Ok(());
    };
    let nameless = |path: &&&Path| place::target(path).to_str().is_none();
    if let Some(path) = paths.iter().find(nameless) {
        return Err(TensorFileError::Write {
            path: path.to_path_buf(),
            reason: "expected a path in UTF-8 for files that take their places together, found \
                     other bytes; use another name or folder"
                .to_owned(),
        });
    }
    match Disk.kind(&journal::of(&place::target(first))) {
        Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
            let operation = "call the journal of several files after this one; use a shorter name";
            Err(io_error(first, operation)(error))
        }
        _ => Ok(()),
    }
}

/// A file that is complete on disk beside its place; if dropped without [`Prepared::commit`], the
/// file is removed.
///
/// If the place is a link, the file that it leads to is replaced and the link stays. A file that is
/// replaced hands on its permissions. Several files that belong together are prepared and then
/// handed to [`commit_together`](crate::commit_together).
#[derive(Debug)]
pub struct Prepared<'a> {
    pub(crate) files: &'a dyn Files,
    /// The place as the caller named it.
    pub(crate) path: PathBuf,
    /// The place once links are followed.
    pub(crate) target: PathBuf,
    /// The path of the complete file until it is moved to its place; empty afterwards.
    pub(crate) part: PathBuf,
    pub(crate) sum: Sum,
}

impl Prepared<'static> {
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
        Self::bytes(path, &serialize(path, tensors, metadata)?)
    }

    /// Writes and syncs any file beside `path`.
    ///
    /// # Errors
    /// [`TensorFileError`]; whatever is at `path` is untouched.
    pub fn bytes(path: &Path, bytes: &[u8]) -> Result<Self, TensorFileError> {
        Prepared::with_room(&Disk, path, checked_target(path)?, bytes)
    }
}

impl<'a> Prepared<'a> {
    /// [`Prepared::bytes`] in any file system and under any name; links are not followed.
    ///
    /// # Errors
    /// [`TensorFileError`]; whatever is at `path` is untouched.
    pub fn bytes_in(
        files: &'a dyn Files,
        path: &Path,
        bytes: &[u8],
    ) -> Result<Self, TensorFileError> {
        Self::with_room(files, path, path.to_owned(), bytes)
    }

    /// [`Prepared::within`] after what dead processes have left there is removed.
    fn with_room(
        files: &'a dyn Files,
        path: &Path,
        target: PathBuf,
        bytes: &[u8],
    ) -> Result<Self, TensorFileError> {
        remove_abandoned_in(files, &place::folder(&target));
        Self::within(files, path, target, bytes)
    }

    fn within(
        files: &'a dyn Files,
        path: &Path,
        target: PathBuf,
        bytes: &[u8],
    ) -> Result<Self, TensorFileError> {
        match files.kind(&target) {
            Ok(FileKind::Folder) => return Err(not_a_file(path, "a folder")),
            Ok(FileKind::Other) => return Err(not_a_file(path, "a device or pipe")),
            _ if target.file_name().is_none() => {
                return Err(not_a_file(path, "a path without a name"));
            }
            // The part's hidden name is short, so a name that is too long would only fail at the
            // rename.
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => {
                return Err(io_error(path, "have a file of this name")(error));
            }
            _ => {}
        }
        let part = part::write(files, &place::folder(&target), bytes)
            .map_err(io_error(path, "write a file in its folder"))?;
        let prepared = Self { files, path: path.to_owned(), target, part, sum: Sum::of(bytes) };
        // A file system without permissions has none to hand on.
        let _ = files.keep_mode(&prepared.target, &prepared.part);
        Ok(prepared)
    }

    /// Renames the file over its place and syncs the folder. Other writers must be kept out by
    /// other means, as [`commit_together`] and [`Claim::commit`](crate::Claim::commit) do.
    ///
    /// # Errors
    /// [`TensorFileError::Io`]; the old file is then still at the place, unless only the sync of
    /// the folder failed.
    pub fn commit(mut self) -> Result<(), TensorFileError> {
        self.files.rename(&self.part, &self.target).map_err(io_error(&self.path, "replace"))?;
        self.part = PathBuf::new();
        // The rename itself is only durable once the folder is.
        self.files
            .sync_folder(&place::folder(&self.target))
            .map_err(io_error(&self.path, "sync its folder"))
    }
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        if !self.part.as_os_str().is_empty() {
            // A part that stays behind costs space only.
            let _ = self.files.remove_file(&self.part);
        }
    }
}

/// Writes a file of tensors: first a temporary file beside `path`, synced, which is then renamed
/// over `path`; last the folder is synced.
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
    commit_together(vec![Prepared::tensors(path, tensors, metadata)?])
}

/// The file that a path leads to, if a file may have that name.
fn checked_target(path: &Path) -> Result<PathBuf, TensorFileError> {
    let target = place::target(path);
    if place::is_link(&target) {
        return Err(not_a_file(path, "links that lead to no end"));
    }
    check_name(path, &target)?;
    Ok(target)
}

/// Refuses names that mean a folder, or a hidden file of this library.
fn check_name(path: &Path, target: &Path) -> Result<(), TensorFileError> {
    let typed = path.as_os_str().as_encoded_bytes();
    if typed.ends_with(b"/") || typed.ends_with(b"/.") {
        return Err(not_a_file(path, "a path that ends as a folder's does; give a file's name"));
    }
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    if name.to_ascii_lowercase().starts_with(part::PREFIX) {
        return Err(TensorFileError::Write {
            path: path.to_owned(),
            reason: format!(
                "expected another name than `{}…`, which journals and files being written have; \
                 use another one",
                part::PREFIX
            ),
        });
    }
    Ok(())
}

fn not_a_file(path: &Path, found: &'static str) -> TensorFileError {
    TensorFileError::NotAFile { path: path.to_owned(), found }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::TensorFile;
    use crate::serialize::tests::tensors;

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
        fs::set_permissions(&ours, fs::Permissions::from_mode(0o640)).unwrap();
        write_atomically(&ours, &tensors(2), HashMap::new()).unwrap();
        assert_eq!(mode(&ours) & 0o777, 0o640, "a replaced file hands it on");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::os::unix::fs::symlink("real", &link).unwrap();
        for value in [1, 2] {
            write_atomically(&link, &tensors(value), HashMap::new()).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(TensorFile::read(&real).unwrap().bytes("a").unwrap(), [value; 8]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_without_an_end_are_refused_and_one_to_nothing_leads_to_the_new_file() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        symlink("l2", at("l1")).unwrap();
        symlink("l1", at("l2")).unwrap();
        symlink("own", at("own")).unwrap();
        for name in ["l1", "l2", "own"] {
            let outcomes = [
                check_writable(&at(name)),
                write_atomically(&at(name), &tensors(1), HashMap::new()),
            ];
            for outcome in outcomes {
                let error = outcome.unwrap_err().to_string();
                let named = format!("{name}: expected a file, found links that lead to no end");
                assert!(error.contains(&named), "{error}");
            }
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink());
        }
        symlink("new", at("dangling")).unwrap();
        write_atomically(&at("dangling"), &tensors(1), HashMap::new()).unwrap();
        assert!(fs::symlink_metadata(at("dangling")).unwrap().is_symlink());
        assert_eq!(TensorFile::read(&at("new")).unwrap().bytes("a").unwrap(), [1; 8]);
    }
}
