//! Files that are complete on disk and have yet to take their places.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::io_error;
use crate::journal::Sum;
use crate::{
    Disk, FileKind, Files, TensorBytes, TensorFileError, part, place, remove_abandoned_in,
    serialize,
};

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
    /// Writes a safetensors file of `tensors` and `metadata` under a temporary name beside `path`,
    /// and syncs it.
    ///
    /// [`Prepared::commit`] then moves the file to `path`.
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

    /// Writes a file of `bytes` under a temporary name beside `path`, and syncs it.
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

    /// Writes and syncs a file beside `target`, which `path` leads to.
    pub(crate) fn within(
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
    /// other means, as [`commit_together`](crate::commit_together) and
    /// [`Claim::commit`](crate::Claim::commit) do.
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

/// The file that a path leads to, if a file may have that name.
pub(crate) fn checked_target(path: &Path) -> Result<PathBuf, TensorFileError> {
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
    TensorFileError::NotAFile { path: path.to_owned(), found: found.into() }
}
