//! Folder of a checkpoint, in the machine's file systems or in one that stands in for them. A lock
//! lets one run at a time save there.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fusestep_planner::PlanError;
use fusestep_tensor_file::{Disk, FileKind, Files};

use crate::Result;
use crate::refusal::refuse;

/// Longest time until a file that another rank has written is seen here, as on network file
/// systems.
const SEEN_WITHIN: Duration = Duration::from_secs(1);

/// Time between two looks for a file of another rank.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A checkpoint's folder; any path is one.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointFolder<'a> {
    pub(crate) files: &'a dyn Files,
    pub(crate) path: &'a Path,
}

impl<'a> CheckpointFolder<'a> {
    /// A folder of another file system than the machine's own: one that a test or a simulation has
    /// made.
    pub fn of(files: &'a dyn Files, path: &'a Path) -> Self {
        Self { files, path }
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The bytes of a file in the folder, which errors call `what`; `None` if there is no such
    /// file.
    pub(crate) fn read_if_any(&self, name: &str, what: &str) -> Result<Option<Vec<u8>>> {
        let path = self.join(name);
        match self.files.read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refuse(&path, what, "a file that can be read", error)),
        }
    }

    /// Whether nothing lies at a path.
    pub(crate) fn is_missing(&self, path: &Path) -> bool {
        let error = self.files.kind(path).err();
        error.is_some_and(|error| error.kind() == ErrorKind::NotFound)
    }

    /// The kind of file at a path. Waits a moment for a file that another rank has written there.
    pub(crate) fn kind_soon(&self, path: &Path) -> std::io::Result<FileKind> {
        let until = Instant::now() + SEEN_WITHIN;
        loop {
            match self.files.kind(path) {
                Err(error) if error.kind() == ErrorKind::NotFound && Instant::now() < until => {
                    std::thread::sleep(LOOK_EVERY);
                }
                found => return found,
            }
        }
    }
}

impl<'a> From<&'a Path> for CheckpointFolder<'a> {
    fn from(path: &'a Path) -> Self {
        Self { files: &Disk, path }
    }
}

impl<'a> From<&'a PathBuf> for CheckpointFolder<'a> {
    fn from(path: &'a PathBuf) -> Self {
        path.as_path().into()
    }
}

/// Writes the names in a folder to disk.
pub(crate) fn sync(folder: CheckpointFolder<'_>, path: &Path) -> Result<()> {
    folder.files.sync_folder(path).map_err(|error| {
        let expected = "one that can be synced";
        refuse(path, "folder", expected, error)
    })
}

/// Refuses an empty path, which some system calls take for the current folder and others for
/// nothing.
pub(crate) fn check_path(folder: &Path) -> Result<()> {
    if folder.as_os_str().is_empty() {
        let expected = "the path of one; `.` is the current folder";
        return Err(refuse(Path::new("checkpoint"), "folder", expected, "an empty path"));
    }
    Ok(())
}

/// Name of the file that is locked; it is empty and stays.
const LOCK: &str = "lock";

/// Lock that keeps other runs from saving into a folder until it is dropped. The operating system
/// releases the lock of a killed process, so the next run has nothing to remove.
///
/// Rank 0 takes the lock, for all ranks of its run.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Locks a folder that exists.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if another run has the lock, or the folder cannot be written.
    pub fn take(folder: &Path) -> Result<Self, PlanError> {
        check_path(folder)?;
        let path = folder.join(LOCK);
        // The file's kind comes first: opening a pipe would wait for a reader.
        if let Ok(FileKind::Folder | FileKind::Other) = Disk.kind(&path) {
            let expected = "an empty file, or none; move what is there, or choose another folder";
            return Err(refuse(&path, "lock", expected, "no ordinary file"));
        }
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        let refused = |found: String| {
            refuse(&path, "lock", "a folder that can be written and no other run saves to", found)
        };
        let file = opened.map_err(|error| refused(error.to_string()))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(refused(
                "one that another run has locked; wait for it, or choose another folder".to_owned(),
            )),
            Err(TryLockError::Error(error)) => Err(refused(error.to_string())),
        }
    }
}
