//! Commits of several files. A journal says which file takes which place, and the next claim of one
//! of the places finishes the journal's moves.
//!
//! ```text
//! part files written, synced       nothing has changed
//! pointers to the journal          beside all files but the first, which it lies beside
//! journal renamed into place       the one commit point: from here on all files count
//! parts renamed over their places  an error takes the renames back;
//!                                  a kill leaves them to the next claim
//! journal and pointers removed
//! ```

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use crate::error::{io_error, is_missing};
use crate::files::look;
use crate::finish::{remove_pointers, sync_folders};
use crate::journal::{self, Before, Journal, Move};
use crate::{Claim, Files, Look, Prepared, TensorFileError, part, place};

/// Claims the places of several files that belong together and puts the files there. After an error
/// all places are as they were; after a kill, the next claim of one of them puts all files in place
/// or none.
///
/// The journal lies beside the first file, hidden, under its name.
///
/// # Errors
/// Those of [`Claim::of`] and [`Claim::commit`].
pub fn commit_together(prepared: Vec<Prepared<'_>>) -> Result<(), TensorFileError> {
    let Some(first) = prepared.first() else {
        return Ok(());
    };
    let targets = prepared.iter().map(|file| file.target.clone());
    Claim::of_targets(first.files, targets.collect(), Vec::new())?.commit(prepared)
}

impl Claim<'_> {
    /// Puts files in their places, all or none. After an error all places are as they were; after a
    /// kill, the next claim of one of them puts all files in place or none.
    ///
    /// # Errors
    /// [`TensorFileError::Changed`] if another program, which makes no claims, has written a file
    /// meanwhile; [`TensorFileError::Io`]. [`TensorFileError::Interrupted`] if renames could not be
    /// taken back: it names the journal with which the next claim completes them.
    pub fn commit(&self, prepared: Vec<Prepared<'_>>) -> Result<(), TensorFileError> {
        commit(self, prepared)
    }
}

/// The work of [`Claim::commit`].
fn commit(claim: &Claim<'_>, mut prepared: Vec<Prepared<'_>>) -> Result<(), TensorFileError> {
    for file in &prepared {
        if claim.before(&file.target).is_none() {
            let reason = "expected one of the claimed files, found another".to_owned();
            return Err(TensorFileError::Write { path: file.path.clone(), reason });
        }
    }
    if prepared.len() < 2 {
        let Some(file) = prepared.pop() else {
            return Ok(());
        };
        require_unchanged(claim, &file)?;
        return file.commit();
    }
    let files = claim.files();
    let journal = journal::of(&prepared[0].target);
    let moves = get_ready(claim, &mut prepared, &journal)?;
    let old = keep_old(files, &prepared);
    let put = put_pointers(files, &journal, &moves)
        .and_then(|()| put_journal(files, &journal, Journal::new(moves.clone())));
    if let Err(error) = put {
        withdraw(files, &prepared);
        remove_pointers(files, &moves);
        forget(files, &old);
        return Err(error);
    }
    let mut moved = Vec::with_capacity(prepared.len());
    if let Err(error) = move_all(claim, &mut prepared, &mut moved) {
        let taken_back = take_back(files, &moved, &old);
        forget(files, &old);
        let withdrawn = taken_back && withdraw(files, &prepared);
        // A journal without all of its files is of no use.
        if taken_back && files.remove_file(&journal).is_ok() && withdrawn {
            remove_pointers(files, &moves);
            return Err(error);
        }
        for file in &mut prepared {
            // The parts belong to the journal now.
            file.part = PathBuf::new();
        }
        return Err(TensorFileError::Interrupted { journal, reason: error.to_string() });
    }
    // Everything is in place; a journal that cannot be removed finds nothing left to do.
    let _ = files.remove_file(&journal);
    remove_pointers(files, &moves);
    forget(files, &old);
    // No journal names any longer what dead processes have left here under an earlier one.
    for file in &prepared {
        part::remove_ready_of(files, &place::folder(&file.target), &journal);
    }
    Ok(())
}

/// Renames the parts durably to names that a journal may move, and returns the moves.
fn get_ready(
    claim: &Claim<'_>,
    prepared: &mut [Prepared<'_>],
    journal: &Path,
) -> Result<Vec<Move>, TensorFileError> {
    let files = claim.files();
    let mut moves = Vec::with_capacity(prepared.len());
    for file in prepared.iter_mut() {
        let ready = part::ready(&file.part, journal);
        files.rename(&file.part, &ready).map_err(io_error(&file.path, "replace"))?;
        file.part = ready;
        let before = claim.before(&file.target).flatten();
        let old = before.map(|look| Before::of(files, &file.target, &look)).transpose();
        // This check comes after the sum, so that the sum is of the file that was claimed.
        require_unchanged(claim, file)?;
        moves.push(Move {
            from: file.part.clone(),
            to: file.target.clone(),
            sum: file.sum.clone(),
            old: old.map_err(io_error(&file.path, "read what it is to replace"))?,
        });
    }
    sync_folders(files, prepared.iter().map(|file| file.target.as_path()))?;
    Ok(moves)
}

/// Requires that a place is as it was when claimed.
fn require_unchanged(claim: &Claim<'_>, file: &Prepared<'_>) -> Result<(), TensorFileError> {
    if Some(look(claim.files(), &file.target)?) == claim.before(&file.target) {
        return Ok(());
    }
    Err(TensorFileError::Changed { path: file.path.clone() })
}

/// Puts a pointer to the journal beside all files but the first, durably.
fn put_pointers(files: &dyn Files, journal: &Path, moves: &[Move]) -> Result<(), TensorFileError> {
    let refused = |error: serde_json::Error| write_error(journal, &error);
    let text = journal::pointer_to(journal).map_err(refused)?;
    let others = || moves.iter().skip(1).map(|step| step.to.as_path());
    for place in others() {
        let pointer = journal::pointer_of(place);
        put_new(files, &pointer, &text)?;
    }
    sync_folders(files, others())
}

/// Puts the journal in its place: the commit point.
fn put_journal(files: &dyn Files, path: &Path, journal: Journal) -> Result<(), TensorFileError> {
    let text = serde_json::to_vec_pretty(&journal).map_err(|error| write_error(path, &error))?;
    put_new(files, path, &text)?;
    sync_folders(files, [path].into_iter()).inspect_err(|_| {
        let _ = files.remove_file(path);
    })
}

/// Puts a hidden file at a path where nothing is; a file that is already there stays.
fn put_new(files: &dyn Files, path: &Path, bytes: &[u8]) -> Result<(), TensorFileError> {
    let part = part::write(files, &place::folder(path), bytes).map_err(io_error(path, "write"))?;
    let moved = match files.look(path) {
        Ok(_) => Err(Error::new(
            ErrorKind::AlreadyExists,
            "expected nothing there, found something of another program's; move it",
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => files.rename(&part, path),
        Err(error) => Err(error),
    };
    moved.map_err(io_error(path, "write")).inspect_err(|_| {
        let _ = files.remove_file(&part);
    })
}

fn write_error(path: &Path, error: &serde_json::Error) -> TensorFileError {
    TensorFileError::Write { path: path.to_owned(), reason: error.to_string() }
}

/// The file that was at a place before the commit.
enum Old {
    Nothing,
    /// A file that is kept under this second name.
    Kept(PathBuf),
    /// A file that is not kept, because the file system has no second names.
    Lost,
}

fn keep_old(files: &dyn Files, prepared: &[Prepared<'_>]) -> Vec<Old> {
    let keep = |file: &Prepared<'_>| {
        if files.kind(&file.target).is_err() {
            return Old::Nothing;
        }
        let name = part::free_name(&place::folder(&file.target));
        match files.link(&file.target, &name) {
            Ok(()) => Old::Kept(name),
            Err(_) => Old::Lost,
        }
    };
    prepared.iter().map(keep).collect()
}

fn forget(files: &dyn Files, old: &[Old]) {
    for old in old {
        if let Old::Kept(name) = old {
            let _ = files.remove_file(name);
        }
    }
}

/// A file that has taken its place.
struct Moved {
    place: PathBuf,
    /// The name that it had until then, which the journal knows.
    ready: PathBuf,
    look: Look,
}

/// Renames all files into place and lists in `moved` those renamed, also if one fails.
fn move_all(
    claim: &Claim<'_>,
    prepared: &mut [Prepared<'_>],
    moved: &mut Vec<Moved>,
) -> Result<(), TensorFileError> {
    let files = claim.files();
    for file in prepared.iter() {
        let look = files.look(&file.part).map_err(io_error(&file.path, "look at its new file"))?;
        require_unchanged(claim, file)?;
        files.rename(&file.part, &file.target).map_err(io_error(&file.path, "replace"))?;
        moved.push(Moved { place: file.target.clone(), ready: file.part.clone(), look });
    }
    sync_folders(files, prepared.iter().map(|file| file.target.as_path()))?;
    for file in prepared {
        file.part = PathBuf::new();
    }
    Ok(())
}

/// Puts the old files back, except where another program has replaced the new ones meanwhile;
/// whether all are back.
///
/// Each new file has the name that the journal knows before an old one is back, so that the next
/// claim can complete whatever stops here. Nothing is taken back if an old file is not kept.
fn take_back(files: &dyn Files, moved: &[Moved], old: &[Old]) -> bool {
    let mut back = Vec::with_capacity(moved.len());
    for (new, old) in moved.iter().zip(old) {
        match files.look(&new.place) {
            Ok(found) if found == new.look => back.push((new, old)),
            Err(error) if !is_missing(&error) => return false,
            _ => {}
        }
    }
    let both_named = |(new, old): &(&Moved, &Old)| match old {
        // A single rename gives the new file its name and leaves nothing at the place.
        Old::Nothing => true,
        Old::Kept(_) => files.link(&new.place, &new.ready).is_ok(),
        Old::Lost => false,
    };
    let restored = |(new, old): &(&Moved, &Old)| match old {
        Old::Nothing => files.rename(&new.place, &new.ready).is_ok(),
        Old::Kept(old) => files.rename(old, &new.place).is_ok(),
        Old::Lost => false,
    };
    let synced = || sync_folders(files, back.iter().map(|(new, _)| new.place.as_path())).is_ok();
    back.iter().all(|(_, old)| !matches!(old, Old::Lost))
        && back.iter().all(both_named)
        && synced()
        && back.iter().all(restored)
        && synced()
}

/// Removes the complete files durably; whether they are gone. A journal moves nothing then, even
/// one that a loss of power brings back.
fn withdraw(files: &dyn Files, prepared: &[Prepared<'_>]) -> bool {
    let removed = |file: &Prepared<'_>| match files.remove_file(&file.part) {
        Err(error) => error.kind() == ErrorKind::NotFound,
        Ok(()) => true,
    };
    let left = prepared.iter().filter(|file| !removed(file)).count();
    left == 0 && sync_folders(files, prepared.iter().map(|file| file.target.as_path())).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::finish_interrupted;
    use crate::journal::Sum;

    #[test]
    fn long_names_in_a_journal_are_quoted_short() {
        let folder = tempfile::tempdir().unwrap();
        let (place, from) = (folder.path().join("p"), folder.path().join(".fusestep-1.ready"));
        fs::write(&place, "new").unwrap();
        fs::write(&from, "new").unwrap();
        let long = PathBuf::from("x".repeat(5_000));
        let step = |from: &Path, to: &Path, sum: Sum| {
            let (from, to) = (from.to_owned(), to.to_owned());
            Move { from, to, sum, old: None }
        };
        let unknown = Sum { len_bytes: 3, xxh3: "y".repeat(5_000) };
        let first = step(&from, &place, Sum::of(b"new"));
        let missing = folder.path().join(format!(".fusestep-{}.ready", "z".repeat(100)));
        for other in
            [step(&long, &long, Sum::of(b"new")), step(&missing, &folder.path().join("s"), unknown)]
        {
            let journal = Journal::new(vec![first.clone(), other]);
            let text = serde_json::to_vec(&journal).unwrap();
            fs::write(folder.path().join(".fusestep-p.journal"), text).unwrap();
            let error = finish_interrupted(&place).unwrap_err().to_string();
            assert!(error.chars().count() < 2_000, "{error}");
            assert_eq!(fs::read(&from).unwrap(), b"new");
        }
    }
}
