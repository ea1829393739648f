//! Several files, one commit: a journal says which files are to take which places, and whoever
//! comes next finishes what it says.
//!
//! ```text
//! part files written, synced       nothing has changed
//! journal renamed into place       the one commit point: from here on all files count
//! parts renamed over their places  an error takes the renames back;
//!                                  a kill leaves them to `finish_interrupted`
//! journal removed
//! ```

use std::path::{Path, PathBuf};

use fusestep_tensor::Quoted;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::write::io_error;
use crate::{Disk, FileKind, Files, Prepared, TensorFileError, part, place};

/// What every journal begins with.
const FORMAT: &str = "fusestep-journal";
/// Newest version of journals that is read.
const VERSION: u32 = 1;

/// What helps where a journal cannot be followed.
const HELP: &str = "look at the files it names and remove it";

/// Length and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    len_bytes: u64,
    /// xxh3 of all bytes, in hexadecimal.
    xxh3: String,
}

impl Sum {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { len_bytes: bytes.len() as u64, xxh3: format!("{:016x}", xxh3_64(bytes)) }
    }

    fn is_of(&self, files: &dyn Files, path: &Path) -> bool {
        let long = FileKind::File { len_bytes: self.len_bytes };
        let as_long = files.kind(path).is_ok_and(|found| found == long);
        as_long && files.read(path).is_ok_and(|bytes| Sum::of(&bytes) == *self)
    }
}

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    format: String,
    version: u32,
    moves: Vec<Move>,
    /// xxh3 of the moves as text, so that a journal that is not whole moves nothing.
    xxh3: String,
}

/// One file that is to take a place.
#[derive(Debug, Serialize, Deserialize)]
struct Move {
    from: PathBuf,
    to: PathBuf,
    #[serde(flatten)]
    sum: Sum,
}

impl Journal {
    fn new(moves: Vec<Move>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, xxh3: sum_of(&moves), moves }
    }

    /// Reads and checks the journal at `path` of the first file `target`; why it is none to follow,
    /// else.
    fn parse(text: &[u8], path: &Path, target: &Path) -> Result<Self, String> {
        /// What every version has.
        #[derive(Deserialize)]
        struct Version {
            format: String,
            version: u64,
        }
        let version: Option<Version> = serde_json::from_slice(text).ok();
        let version = version.filter(|version| version.format == FORMAT);
        if let Some(Version { version, .. }) = version
            && version > u64::from(VERSION)
        {
            return Err(format!(
                "expected a journal of version {VERSION} at most, found version {version}, which a \
                 newer fusestep has written; finish it with that one"
            ));
        }
        let journal: Option<Self> = serde_json::from_slice(text).ok();
        let whole =
            |journal: &Self| journal.format == FORMAT && journal.xxh3 == sum_of(&journal.moves);
        let Some(journal) = journal.filter(whole) else {
            return Err(format!("expected moves and their checksum, found others; {HELP}"));
        };
        journal.check_moves(path, target)?;
        Ok(journal)
    }

    /// Refuses moves that [`commit_together`] cannot have written: anyone can put a journal into a
    /// folder that is shared, and must not have other files moved by it.
    fn check_moves(&self, path: &Path, target: &Path) -> Result<(), String> {
        let first = self.moves.first().map(|step| step.to.as_path());
        if first != Some(target) {
            let found = first.map_or_else(|| "none".to_owned(), quoted);
            return Err(format!(
                "expected {} as the first file to be replaced, found {found}; {HELP}",
                quoted(target)
            ));
        }
        let ours = |step: &&Move| {
            step.to.file_name().is_some()
                && step.from.parent() == step.to.parent()
                && part::is_ready(&step.from, path)
        };
        match self.moves.iter().find(|step| !ours(step)) {
            None => Ok(()),
            Some(step) => Err(format!(
                "expected moves of complete parts (`.fusestep-….ready`) to files beside them, \
                 found one from {} to {}; {HELP}",
                quoted(&step.from),
                quoted(&step.to)
            )),
        }
    }
}

/// A name from a journal as messages quote it.
fn quoted(path: &Path) -> String {
    Quoted(&path.to_string_lossy()).to_string()
}

fn sum_of(moves: &[Move]) -> String {
    let text = serde_json::to_vec(moves).unwrap_or_default();
    Sum::of(&text).xxh3
}

/// Puts several files that belong together in their places: after an error all places are as they
/// were, after a kill [`finish_interrupted`] puts all in place or none.
///
/// The journal lies beside the first file, hidden, under its name.
///
/// # Errors
/// [`TensorFileError::Io`]. Should the renames that had been made not be taken back either, the
/// error says where the journal is with which the next call of [`finish_interrupted`] completes
/// them.
pub fn commit_together(mut prepared: Vec<Prepared<'_>>) -> Result<(), TensorFileError> {
    if prepared.len() < 2 {
        return prepared.pop().map_or(Ok(()), Prepared::commit);
    }
    let files = prepared[0].files;
    let journal = journal_of(&prepared[0].target);
    for file in &mut prepared {
        let ready = part::ready(&file.part, &journal);
        files.rename(&file.part, &ready).map_err(io_error(&file.path, "replace"))?;
        file.part = ready;
    }
    sync_folders(files, &prepared)?;
    let moves = prepared.iter().map(|file| Move {
        from: file.part.clone(),
        to: file.target.clone(),
        sum: file.sum.clone(),
    });
    let text = serde_json::to_vec_pretty(&Journal::new(moves.collect()));
    let text = text.map_err(|error| TensorFileError::Write {
        path: journal.clone(),
        reason: error.to_string(),
    })?;
    let old = keep_old(files, &prepared);
    // The commit point.
    let committed = Prepared::bytes_in(files, &journal, &text).and_then(Prepared::commit);
    if committed.is_err() {
        let _ = files.remove_file(&journal);
        forget(files, &old);
        return committed;
    }
    if let Err((done, error)) = move_all(files, &mut prepared) {
        let taken_back = take_back(files, &prepared[..done], &old);
        forget(files, &old);
        if taken_back && files.remove_file(&journal).is_ok() {
            return Err(error);
        }
        for file in &mut prepared {
            // They are the journal's now.
            file.part = PathBuf::new();
        }
        return Err(TensorFileError::Interrupted { journal, reason: error.to_string() });
    }
    // Everything is in place; a journal that cannot be removed finds nothing left to do.
    let _ = files.remove_file(&journal);
    forget(files, &old);
    // No journal names any longer what processes have left here that died before theirs.
    for file in &prepared {
        part::remove_ready_of(files, &place::folder(&file.target), &journal);
    }
    Ok(())
}

/// Finishes what a [`commit_together`] that was killed had committed for the place `path`, if there
/// is any such; whether there was.
///
/// # Errors
/// [`TensorFileError::Io`]; [`TensorFileError::Journal`] if a file that it names is neither there
/// nor in its place, and nothing has been changed.
pub fn finish_interrupted(path: &Path) -> Result<bool, TensorFileError> {
    finish_interrupted_in(&Disk, &place::target(path))
}

/// [`finish_interrupted`] in any file system; links are not followed.
///
/// # Errors
/// As there.
pub fn finish_interrupted_in(files: &dyn Files, target: &Path) -> Result<bool, TensorFileError> {
    let path = journal_of(target);
    let Ok(FileKind::File { len_bytes }) = files.kind(&path) else {
        return Ok(false);
    };
    let refuse = |reason: String| TensorFileError::Journal { path: path.clone(), reason };
    if len_bytes > part::MAX_JOURNAL_BYTES {
        let most = part::MAX_JOURNAL_BYTES;
        let reason =
            format!("expected a journal of at most {most} bytes, found {len_bytes}; {HELP}");
        return Err(refuse(reason));
    }
    let text = files.read(&path).map_err(io_error(&path, "read"))?;
    let journal = Journal::parse(&text, &path, target).map_err(refuse)?;
    // Everything is looked at before anything moves.
    let (mut left, mut moved) = (Vec::new(), 0);
    for step in &journal.moves {
        if step.sum.is_of(files, &step.from) {
            left.push(step);
        } else if step.sum.is_of(files, &step.to) {
            moved += 1;
        }
    }
    if left.is_empty() && moved == 0 {
        // Taken back, and the journal's own removal was lost.
        files.remove_file(&path).map_err(io_error(&path, "remove"))?;
        return Ok(false);
    }
    for step in &journal.moves {
        if !step.sum.is_of(files, &step.from) && !step.sum.is_of(files, &step.to) {
            let reason = format!(
                "expected {} bytes with xxh3 {} in {} or in {}, found them in neither; {HELP}",
                step.sum.len_bytes,
                Quoted(&step.sum.xxh3),
                quoted(&step.from),
                quoted(&step.to)
            );
            return Err(refuse(reason));
        }
    }
    for step in left {
        files
            .rename(&step.from, &step.to)
            .map_err(io_error(Path::new(&quoted(&step.to)), "replace"))?;
    }
    for step in &journal.moves {
        files
            .sync_folder(&place::folder(&step.to))
            .map_err(io_error(Path::new(&quoted(&step.to)), "sync its folder"))?;
    }
    files.remove_file(&path).map_err(io_error(&path, "remove"))?;
    Ok(true)
}

/// Where the journal of a first file lies.
pub(crate) fn journal_of(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    place::folder(target).join(format!(".fusestep-{name}{}", part::JOURNAL))
}

/// What was at a place.
enum Old {
    Nothing,
    /// A file that has this second name.
    Kept(PathBuf),
    /// A file, in a file system without second names.
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

/// Renames all; how many are in their places if one cannot be.
fn move_all(
    files: &dyn Files,
    prepared: &mut [Prepared<'_>],
) -> Result<(), (usize, TensorFileError)> {
    for (done, file) in prepared.iter().enumerate() {
        files
            .rename(&file.part, &file.target)
            .map_err(|error| (done, io_error(&file.path, "replace")(error)))?;
    }
    let count = prepared.len();
    sync_folders(files, prepared).map_err(|error| (count, error))?;
    for file in prepared {
        file.part = PathBuf::new();
    }
    Ok(())
}

/// Puts the old files back; whether all are.
fn take_back(files: &dyn Files, moved: &[Prepared<'_>], old: &[Old]) -> bool {
    let mut all = true;
    for (file, old) in moved.iter().zip(old) {
        all &= match old {
            Old::Nothing => files.remove_file(&file.target).is_ok(),
            Old::Kept(old) => files.rename(old, &file.target).is_ok(),
            Old::Lost => false,
        };
    }
    all && sync_folders(files, moved).is_ok()
}

fn sync_folders(files: &dyn Files, prepared: &[Prepared<'_>]) -> Result<(), TensorFileError> {
    for file in prepared {
        files
            .sync_folder(&place::folder(&file.target))
            .map_err(io_error(&file.path, "sync its folder"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn long_names_in_a_journal_are_quoted_short() {
        let folder = tempfile::tempdir().unwrap();
        let (place, from) = (folder.path().join("p"), folder.path().join("new"));
        fs::write(&from, "new").unwrap();
        let long = PathBuf::from("x".repeat(5_000));
        let moves = |from: &Path, to: &Path, sum: Sum| {
            let (from, to) = (from.to_owned(), to.to_owned());
            Journal::new(vec![Move { from, to, sum }])
        };
        let unknown = Sum { len_bytes: 3, xxh3: "y".repeat(5_000) };
        let present = Move { from: from.clone(), to: place.clone(), sum: Sum::of(b"new") };
        let mut missing = moves(&long, &long, unknown).moves;
        missing.push(present);
        for journal in [Journal::new(missing), moves(&from, &long, Sum::of(b"new"))] {
            let text = serde_json::to_vec(&journal).unwrap();
            fs::write(folder.path().join(".fusestep-p.journal"), text).unwrap();
            let error = finish_interrupted(&place).unwrap_err().to_string();
            assert!(error.chars().count() < 2_000, "{error}");
            assert_eq!(fs::read(&from).unwrap(), b"new");
        }
    }
}
