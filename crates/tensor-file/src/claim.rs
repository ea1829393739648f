//! Claims of files, for one writer at a time. A claim keeps others out, finishes interrupted
//! commits first, and notices files that change all the same.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::io_error;
use crate::files::look;
use crate::finish::{self, Finished};
use crate::journal::{self, Journal};
use crate::{Disk, Files, Lock, Look, TensorFileError, part, place};

/// Most rounds in which places named by journals are added to the locked places.
const MOST_ROUNDS: usize = 8;

/// Claim of several files: keeps other claims of them out until it is dropped, and knows how the
/// files were.
///
/// A program that reads files, changes them and writes them back claims them before it reads. What
/// [`Claim::commit`] replaces is then what the program has read.
#[derive(Debug)]
pub struct Claim<'a> {
    files: &'a dyn Files,
    /// Each place, and the file that was there when it was claimed.
    places: Vec<(PathBuf, Option<Look>)>,
    finished: Vec<Finished>,
    _locks: Locks,
}

impl Claim<'static> {
    /// Claims files, whether they exist yet or not; for a link, the file that it leads to.
    ///
    /// # Errors
    /// [`TensorFileError::Busy`] if another writer holds one of the files for longer than ten
    /// seconds; [`TensorFileError::Io`] if a folder cannot be written; the errors of
    /// [`finish_interrupted`].
    pub fn of(paths: &[&Path]) -> Result<Self, TensorFileError> {
        Self::with_inputs(paths, &[])
    }

    /// [`Claim::of`] for a program that also reads other files. An interrupted commit of these is
    /// finished under the same locks; the files themselves are not claimed.
    ///
    /// # Errors
    /// Those of [`Claim::of`].
    pub fn with_inputs(paths: &[&Path], inputs: &[&Path]) -> Result<Self, TensorFileError> {
        let targets = |paths: &[&Path]| paths.iter().map(|path| place::target(path)).collect();
        Claim::of_targets(&Disk, targets(paths), targets(inputs))
    }
}

impl<'a> Claim<'a> {
    /// [`Claim::of`] in any file system; links are not followed.
    ///
    /// # Errors
    /// Those of [`Claim::of`].
    pub fn of_in(files: &'a dyn Files, paths: &[&Path]) -> Result<Self, TensorFileError> {
        let targets = paths.iter().map(|path| path.to_path_buf());
        Self::of_targets(files, targets.collect(), Vec::new())
    }

    pub(crate) fn of_targets(
        files: &'a dyn Files,
        targets: Vec<PathBuf>,
        inputs: Vec<PathBuf>,
    ) -> Result<Self, TensorFileError> {
        let (mut locks, journals) = lock_all(files, &targets, &inputs)?;
        let mut finished = Vec::new();
        for (path, journal) in &journals {
            finished.extend(finish::finish(files, path, journal)?);
        }
        // The other places of the journals are of no concern any more.
        locks.retain(|(place, _)| targets.contains(place));
        let mut places = Vec::with_capacity(targets.len());
        for target in targets {
            if files.look(&journal::pointer_of(&target)).is_ok() {
                // The pointer's journal is over.
                let _ = files.remove_file(&journal::pointer_of(&target));
            }
            let look = look(files, &target)?;
            places.push((target, look));
        }
        Ok(Self { files, places, finished, _locks: locks })
    }

    /// The interrupted commits that the claim has found and finished.
    pub fn finished(&self) -> &[Finished] {
        &self.finished
    }

    /// The file that was at a place when it was claimed; the outer `None` for a place that is not
    /// claimed.
    pub(crate) fn before(&self, target: &Path) -> Option<Option<Look>> {
        let place = self.places.iter().find(|(place, _)| place == target);
        place.map(|(_, look)| *look)
    }

    /// The file system in which the places are.
    pub(crate) fn files(&self) -> &'a dyn Files {
        self.files
    }
}

type Journals = Vec<(PathBuf, Journal)>;

/// Each locked place and its lock.
type Locks = Vec<(PathBuf, Lock)>;

/// Locks files and all places that the journals of interrupted commits would move with them or with
/// an input. The locks are taken in the order of the paths, so that two claims of the same files do
/// not wait for each other.
fn lock_all(
    files: &dyn Files,
    targets: &[PathBuf],
    inputs: &[PathBuf],
) -> Result<(Locks, Journals), TensorFileError> {
    let mut places: BTreeSet<PathBuf> = targets.iter().cloned().collect();
    for _ in 0..MOST_ROUNDS {
        let mut locks = Vec::with_capacity(places.len());
        for place in &places {
            let lock = files.lock(&part::beside(place, part::LOCK));
            match lock.map(|lock| (place.clone(), lock)) {
                Ok(lock) => locks.push(lock),
                // A journal may name a folder that is gone.
                Err(error) if error.kind() == ErrorKind::NotFound && !targets.contains(place) => {}
                Err(error) => return Err(not_locked(place, error)),
            }
        }
        let mut journals = Journals::new();
        for place in places.iter().chain(inputs) {
            if let Some((path, journal)) = journal::find(files, place)?
                && journals.iter().all(|(known, _)| *known != path)
            {
                journals.push((path, journal));
            }
        }
        let moved = journals.iter().flat_map(|(_, journal)| &journal.moves);
        let known = places.len();
        places.extend(moved.map(|step| step.to.clone()).collect::<Vec<_>>());
        if places.len() == known {
            return Ok((locks, journals));
        }
    }
    let reason = "expected journals of a few files, found them to name more and more; look at them";
    let path = targets.first().cloned().unwrap_or_default();
    Err(TensorFileError::Journal { path, reason: reason.to_owned() })
}

fn not_locked(place: &Path, error: std::io::Error) -> TensorFileError {
    if error.kind() == ErrorKind::WouldBlock {
        let lock = part::beside(place, part::LOCK);
        let told = error.get_ref().map(|told| format!(": {told}")).unwrap_or_default();
        return TensorFileError::Busy { path: place.to_owned(), lock, told };
    }
    io_error(place, "write a file in its folder")(error)
}

/// Finishes an interrupted [`Claim::commit`] of the place `path`, if there is one, and returns how
/// it has ended.
///
/// # Errors
/// [`TensorFileError::Busy`] while the commit's writer lives; [`TensorFileError::Journal`] for a
/// journal that cannot be followed, before anything has changed; [`TensorFileError::Io`].
pub fn finish_interrupted(path: &Path) -> Result<Option<Finished>, TensorFileError> {
    finish_interrupted_in(&Disk, &place::target(path))
}

/// [`finish_interrupted`] in any file system; links are not followed.
///
/// # Errors
/// Those of [`finish_interrupted`].
pub fn finish_interrupted_in(
    files: &dyn Files,
    target: &Path,
) -> Result<Option<Finished>, TensorFileError> {
    // Most of the time there is no journal, and then the folder need not be writable.
    if journal::find(files, target)?.is_none() {
        return Ok(None);
    }
    let mut claim = Claim::of_targets(files, vec![target.to_owned()], Vec::new())?;
    Ok(claim.finished.pop())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::journal::{Before, Move, Sum};

    #[test]
    fn a_journal_that_only_an_input_leads_to_is_finished_under_the_same_locks() {
        let root = tempfile::tempdir().unwrap();
        let folder = fs::canonicalize(root.path()).unwrap();
        let [p, s, new] = ["p", "s", "new"].map(|name| folder.join(name));
        let moves = [&p, &s].into_iter().enumerate().map(|(at, to)| {
            let from = folder.join(format!(".fusestep-{at}.ready"));
            fs::write(to, "old").unwrap();
            fs::write(&from, "new").unwrap();
            let old = Some(Before::of(&Disk, to, &Disk.look(to).unwrap()).unwrap());
            Move { from, to: to.clone(), sum: Sum::of(b"new"), old }
        });
        // Nothing beside the second file leads to it, as with journals of version 1.
        let journal = serde_json::to_vec(&Journal::new(moves.collect())).unwrap();
        fs::write(journal::of(&p), journal).unwrap();
        let claim = Claim::with_inputs(&[&new, &s], &[&p]).unwrap();
        assert_eq!(claim.finished(), [Finished::Completed { place: p.clone() }]);
        assert_eq!([&p, &s].map(|place| fs::read_to_string(place).unwrap()), ["new", "new"]);
        // An input is nobody's to keep.
        assert_eq!(Claim::of(&[&p]).unwrap().finished(), []);
        assert!(claim.before(&s).is_some() && claim.before(&p).is_none());
    }
}
