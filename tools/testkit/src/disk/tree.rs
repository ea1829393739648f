//! Names of a disk in memory, and changes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file, whatever its names.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Time at which the file was written; no two files have the same time.
    pub(super) written: i64,
    /// Whether another user owns it.
    pub(super) is_foreign: bool,
}

/// Files and folders.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    pub(super) files: BTreeMap<PathBuf, Arc<Content>>,
    pub(super) folders: BTreeSet<PathBuf>,
}

/// A change of one name.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Make(PathBuf, Arc<Content>),
    MakeFolder(PathBuf),
    Rename(PathBuf, PathBuf, Arc<Content>),
    Remove(PathBuf),
    RemoveFolder(PathBuf),
}

impl Tree {
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Make(path, bytes) => {
                self.files.insert(path.clone(), bytes.clone());
            }
            Change::MakeFolder(path) => {
                self.folders.insert(path.clone());
            }
            Change::Rename(from, to, bytes) => {
                self.files.remove(from);
                self.files.insert(to.clone(), bytes.clone());
            }
            Change::Remove(path) => {
                self.files.remove(path);
            }
            Change::RemoveFolder(path) => {
                self.folders.remove(path);
            }
        }
    }
}

impl Change {
    /// Whether the change makes, removes or renames the path.
    pub(super) fn is_of(&self, named: &Path) -> bool {
        match self {
            Change::Make(path, _)
            | Change::MakeFolder(path)
            | Change::Remove(path)
            | Change::RemoveFolder(path) => path == named,
            Change::Rename(from, to, _) => from == named || to == named,
        }
    }

    /// Whether a sync of the folder makes the change durable.
    pub(super) fn is_in(&self, folder: &Path) -> bool {
        let path = match self {
            Change::Make(path, _)
            | Change::MakeFolder(path)
            | Change::Remove(path)
            | Change::RemoveFolder(path)
            | Change::Rename(_, path, _) => path,
        };
        path.parent() == Some(folder)
    }
}
