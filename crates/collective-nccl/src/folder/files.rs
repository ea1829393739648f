//! Files of a group's ranks in a folder. Files appear whole, one error closes the group for all
//! ranks, and the last rank removes the folder.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{fs, thread};

use fusestep_collective::CollectiveError;

/// Name of the file that closes a group.
const CLOSED: &str = "closed";

/// The first and the longest pause between two looks at a folder.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];

/// The folder of a group as one of its ranks uses it.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) folder: PathBuf,
    pub(super) rank: usize,
    /// Folders of the groups that this one was split from. An error that closes one of them closes
    /// this group.
    above: Vec<PathBuf>,
    /// Error by which this rank's group is closed, once this rank knows it.
    found: Mutex<Option<CollectiveError>>,
}

impl Files {
    pub(super) fn new(folder: PathBuf, rank: usize, above: Vec<PathBuf>) -> Self {
        Self { folder, rank, above, found: Mutex::new(None) }
    }

    /// This folder and those above it.
    pub(super) fn chain(&self) -> Vec<PathBuf> {
        let own = std::iter::once(self.folder.clone());
        own.chain(self.above.iter().cloned()).collect()
    }

    /// Writes a file to the folder; others see all of it or nothing.
    pub(super) fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.folder.join(format!(".{name}-{}", self.rank));
        fs::write(&unfinished, bytes)?;
        fs::rename(unfinished, self.folder.join(name))
    }

    /// Writes a file to the folder unless another rank has written it already; returns the bytes of
    /// the file in the folder.
    fn publish_first(&self, name: &str, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let unfinished = self.folder.join(format!(".{name}-{}", self.rank));
        let path = self.folder.join(name);
        fs::write(&unfinished, bytes)?;
        let linked = fs::hard_link(&unfinished, &path);
        fs::remove_file(&unfinished)?;
        match linked {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => fs::read(path),
        }
    }

    /// Reads a file of the folder, if it is there.
    pub(super) fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read(&self.folder.join(name))
    }

    /// Removes a file that nobody reads any more.
    pub(super) fn withdraw(&self, name: &str) {
        // A file that stays is removed with the folder.
        let _ = fs::remove_file(self.folder.join(name));
    }

    /// Closes the group for all ranks; returns the error that holds.
    pub(super) fn close(&self, error: CollectiveError) -> CollectiveError {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = &*found {
            return found.clone();
        }
        // A rank that leaves writes a file of its own. It ends calls of this group, and none of the
        // groups that were split from it.
        if let CollectiveError::Left { .. } = error {
            return found.insert(error).clone();
        }
        let bytes = error.to_bytes();
        let held = match self.publish_first(CLOSED, &bytes) {
            Ok(first) if first != bytes => decode(&first),
            _ => error,
        };
        found.insert(held).clone()
    }

    /// The error that has closed the group, or that a rank of `ranks` has left.
    pub(super) fn closing(
        &self,
        mut ranks: impl Iterator<Item = usize>,
    ) -> Option<CollectiveError> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if found.is_some() {
            return found.clone();
        }
        let said = |path: PathBuf| {
            let bytes = read(&path).ok().flatten()?;
            Some(decode(&bytes))
        };
        // A rank that leaves after an error has closed the group first. So leavers are read before
        // the error, which then cannot be missed.
        let gone = ranks.find_map(|rank| said(self.folder.join(left(rank))));
        let chain = self.chain();
        let closed = chain.iter().find_map(|folder| said(folder.join(CLOSED)));
        closed.or(gone)
    }

    /// Writes the file that says that this rank has left after so many calls. The last rank removes
    /// the folder.
    pub(super) fn leave(&self, world_size: usize, calls: u64) {
        let rank = self.rank;
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // A rank that leaves because another has left repeats that error, so that all name the same
        // rank.
        let why = match &*found {
            Some(first @ CollectiveError::Left { .. }) => first.clone(),
            _ => CollectiveError::Left { rank, calls },
        };
        let is_gone = |rank: usize| self.folder.join(left(rank)).exists();
        if self.publish(&left(rank), &why.to_bytes()).is_err() || !(0..world_size).all(is_gone) {
            return;
        }
        // Files that cannot be removed stay, and the next run in this folder reports them.
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
        // A folder that holds groups which still run stays until the last of those goes.
        for folder in self.chain() {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Name of the file that says that a rank has left.
fn left(rank: usize) -> String {
    format!("left-{rank}")
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Pauses between two looks at a folder, longer after more looks.
pub(super) fn pause(looks: u32) {
    thread::sleep((PAUSES[0] * (1 << (looks / 8).min(10))).min(PAUSES[1]));
}

/// Reads the error in a file.
fn decode(bytes: &[u8]) -> CollectiveError {
    CollectiveError::from_bytes(bytes).unwrap_or_else(|| CollectiveError::Aborted {
        rank: 0,
        reason: format!(
            "expected an error of this program's version, found `{}`",
            String::from_utf8_lossy(bytes)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_error_is_named() {
        let error = CollectiveError::Left { rank: 1, calls: 0 };
        assert_eq!(decode(&error.to_bytes()), error);
        let strange = decode(b"of another kind");
        assert!(strange.to_string().contains("of another kind"), "{strange}");
    }
}
