//! The names that a session has in the file system while its ranks come.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

use crate::ProcessError;
use crate::life::Life;
use crate::rendezvous::creator;

/// Where the system has its shared memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// Where a session may lie, the best place first.
pub(crate) fn folders() -> [PathBuf; 2] {
    [PathBuf::from(SHARED_MEMORY), std::env::temp_dir()]
}

/// The name of a session's files, or its beginning.
pub(crate) fn segment_name(session: &str) -> String {
    format!("fusestep-{:032x}", xxh3_128(session.as_bytes()))
}

/// Removes what dead processes of a session have left; for launchers, when all have ended.
pub(crate) fn remove_leftovers(session: &str) {
    let name = segment_name(session);
    for folder in folders() {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        for entry in entries {
            let is_ours = |found: &str| found.starts_with(&name);
            if entry.file_name().to_str().is_some_and(is_ours) {
                // Somebody else may have been faster.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Names that were given to files, to be taken back.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// With the number of the file, since somebody may have given the name to another one.
    given: Vec<(PathBuf, u64)>,
}

impl Names {
    pub(crate) fn add(&mut self, path: &Path, file: &File) {
        if let Ok(data) = file.metadata() {
            self.given.push((path.to_owned(), data.ino()));
        }
    }

    /// Gives the file at `hidden` the name `public`, unless a living process has a file there.
    pub(crate) fn publish(&mut self, hidden: &Path, public: &Path) -> io::Result<()> {
        if std::fs::hard_link(hidden, public).is_err() {
            if creator(public).is_some_and(Life::is_alive) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            // What a dead process has left is nobody's. It may be gone by now.
            let _ = std::fs::remove_file(public);
            std::fs::hard_link(hidden, public)?;
        }
        if let Some((path, _)) = self.given.iter_mut().find(|(path, _)| path == hidden) {
            *path = public.to_owned();
        }
        std::fs::remove_file(hidden)
    }

    /// Takes them back.
    pub(crate) fn remove(&self) {
        for (path, number) in &self.given {
            if std::fs::metadata(path).is_ok_and(|data| data.ino() == *number) {
                // Another rank may have been faster.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// What the system refused.
pub(crate) fn system(what: String, error: &io::Error) -> ProcessError {
    ProcessError::System {
        what,
        reason: error.to_string(),
    }
}
