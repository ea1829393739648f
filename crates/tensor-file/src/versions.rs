//! Versions of files that are read together, for readers that make no claims.

use std::path::{Path, PathBuf};

use crate::files::look;
use crate::{Disk, Files, Look, TensorFileError, journal, part, place};

/// Versions of several files, looked at before the files are read, so that their contents belong
/// together.
#[derive(Debug)]
pub struct Versions<'a> {
    files: &'a dyn Files,
    /// The file that a path leads to.
    follow: fn(&Path) -> PathBuf,
    versions: Vec<Version>,
}

#[derive(Debug, PartialEq)]
struct Version {
    path: PathBuf,
    /// The file that the path led to once links were followed.
    target: PathBuf,
    look: Option<Look>,
    /// Time of the last change of the file or its names. A commit that was taken back shows here
    /// only: the file went away and came back.
    touched_ns: Option<i64>,
}

impl Versions<'static> {
    /// Looks at files; an interrupted commit of one of them must be finished first.
    ///
    /// # Errors
    /// [`TensorFileError::Io`].
    pub fn of(paths: &[&Path]) -> Result<Self, TensorFileError> {
        Versions::looked_at(&Disk, place::target, paths)
    }
}

impl<'a> Versions<'a> {
    /// [`Versions::of`] in any file system; links are not followed.
    ///
    /// # Errors
    /// Those of [`Versions::of`].
    pub fn of_in(files: &'a dyn Files, paths: &[&Path]) -> Result<Self, TensorFileError> {
        Self::looked_at(files, Path::to_path_buf, paths)
    }

    fn looked_at(
        files: &'a dyn Files,
        follow: fn(&Path) -> PathBuf,
        paths: &[&Path],
    ) -> Result<Self, TensorFileError> {
        let mut seen = Self { files, follow, versions: Vec::with_capacity(paths.len()) };
        for path in paths {
            seen.versions.push(seen.version(path)?);
        }
        Ok(seen)
    }

    fn version(&self, path: &Path) -> Result<Version, TensorFileError> {
        let target = (self.follow)(path);
        let look = look(self.files, &target)?;
        let touched_ns = self.files.touched_ns(&target).ok();
        Ok(Version { path: path.to_owned(), target, look, touched_ns })
    }

    /// Requires that all files are as they were, and that no other program is replacing several of
    /// them.
    ///
    /// # Errors
    /// [`TensorFileError::Changed`], also for a file that is missing now as before;
    /// [`TensorFileError::Busy`].
    pub fn require_same(&self) -> Result<(), TensorFileError> {
        for before in &self.versions {
            let Version { path, target, look, .. } = before;
            // A file that is missing was read all the same: it came and went meanwhile.
            if look.is_none() || self.version(path)? != *before {
                return Err(TensorFileError::Changed { path: path.clone() });
            }
            if journal::find(self.files, target)?.is_some() {
                let lock = part::beside(target, part::LOCK);
                let (path, told) = (path.clone(), String::new());
                return Err(TensorFileError::Busy { path, lock, told });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::journal::{Before, Journal, Move, Sum};

    #[test]
    fn files_of_a_commit_that_is_under_way_are_not_of_one_version() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let at = folders.each_ref().map(|folder| fs::canonicalize(folder.path()).unwrap());
        let [p, s] = [at[0].join("p"), at[1].join("s")];
        let (from, journal) = (at[1].join(".fusestep-1.ready-elsewhere"), journal::of(&p));
        fs::write(&s, "old").unwrap();
        let before = Before::of(&Disk, &s, &Disk.look(&s).unwrap()).unwrap();
        // The first file is in its place already.
        fs::write(&p, "new").unwrap();
        let moved = |from: PathBuf, to: &Path, old: Option<Before>| {
            let to = to.to_owned();
            Move { from, to, sum: Sum::of(b"new"), old }
        };
        let moves =
            vec![moved(at[0].join(".fusestep-1.ready"), &p, None), moved(from, &s, Some(before))];
        fs::write(&journal, serde_json::to_vec(&Journal::new(moves)).unwrap()).unwrap();
        fs::write(journal::pointer_of(&s), journal::pointer_to(&journal).unwrap()).unwrap();
        for path in [&p, &s] {
            let error = Versions::of(&[path]).unwrap().require_same().unwrap_err();
            assert!(matches!(&error, TensorFileError::Busy { path: busy, .. } if busy == path));
        }
    }

    #[test]
    fn a_file_that_is_missing_is_of_no_version() {
        let folder = tempfile::tempdir().unwrap();
        let versions = Versions::of(&[&folder.path().join("p")]).unwrap();
        assert!(matches!(versions.require_same(), Err(TensorFileError::Changed { .. })));
    }

    #[test]
    fn files_that_change_between_two_looks_are_not_of_one_version() {
        let folder = tempfile::tempdir().unwrap();
        let [p, s, new] = ["p", "s", "new"].map(|name| folder.path().join(name));
        let changes: [fn(&Path, &Path); 5] = [
            |place, _| fs::write(place, "longer than before").unwrap(),
            |place, new| fs::rename(new, place).unwrap(),
            |place, _| fs::remove_file(place).unwrap(),
            |place, _| {
                let file = fs::File::options().write(true).open(place).unwrap();
                file.set_modified(std::time::UNIX_EPOCH).unwrap();
            },
            // A commit that is taken back.
            |place, new| {
                let old = place.with_extension("old");
                fs::hard_link(place, &old).unwrap();
                fs::rename(new, place).unwrap();
                fs::rename(&old, place).unwrap();
            },
        ];
        for change in changes {
            for at in [&p, &s] {
                for path in [&p, &s, &new] {
                    fs::write(path, "old").unwrap();
                }
                let versions = Versions::of(&[&p, &s]).unwrap();
                versions.require_same().unwrap();
                // Longer than a tick of the clock by which changes are dated.
                std::thread::sleep(Duration::from_millis(20));
                change(at, &new);
                let error = versions.require_same().unwrap_err();
                assert!(matches!(&error, TensorFileError::Changed { path } if path == at));
            }
        }
    }
}
