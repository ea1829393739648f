//! One run at a time in a checkpoint's folder.

use std::fs::{File, TryLockError};
use std::path::Path;

use fusestep_tensor_file::{Disk, FileKind, Files};

use super::manifest::refuse;
use crate::PlanError;

/// Name of the file that is locked; it is empty and stays.
const LOCK: &str = "lock";

/// Keeps other runs from saving into a folder, for as long as it lives. The operating system drops
/// it with the process, so a run that is killed leaves nothing behind that the next would have to
/// remove.
///
/// Rank 0 takes it, for all ranks of its run.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Locks a folder that exists.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] if another run has it, or the folder cannot be written.
    pub fn take(folder: &Path) -> Result<Self, PlanError> {
        let path = folder.join(LOCK);
        // Looked at before it is opened: opening a pipe waits for a reader.
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
