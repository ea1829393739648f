//! Ends of interrupted commits: the files of the commit take their places, unless another program
//! has written there since.

use std::fmt;
use std::path::{Path, PathBuf};

use fusestep_tensor::Quoted;

use crate::error::io_error;
use crate::files::look;
use crate::journal::{self, HELP, Journal, Move, quoted};
use crate::{FileKind, Files, Look, TensorFileError, place};

/// Outcome of an interrupted commit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finished {
    /// All files of the commit are in their places.
    Completed {
        /// The first place.
        place: PathBuf,
    },
    /// The files are in their places, except that a file written since stays.
    Kept {
        /// The place of the file that stays.
        place: PathBuf,
    },
    /// No file had taken its place yet, and one was written since: all files stay as they are.
    Dropped {
        /// The place of a file that is written since, or whose new file is damaged.
        place: PathBuf,
    },
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, what) = match self {
            Self::Completed { place } => {
                (place, "an earlier step that was interrupted is finished")
            }
            Self::Kept { place } => (
                place,
                "an earlier step was interrupted, and this file was written since: it stays",
            ),
            Self::Dropped { place } => (
                place,
                "an earlier step was interrupted, and its files were written or are damaged since: \
                 that step counts for nothing",
            ),
        };
        // A journal may name any path.
        write!(f, "{}: {what}", quoted(place))
    }
}

/// State of a move's place, compared with the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The new file of the move.
    New,
    /// The old file, as it was, or nothing where nothing was.
    Old,
    /// The bytes of the old file, written again since.
    Again,
    /// No file, where the old file was.
    Gone,
    /// Another file.
    Changed,
}

/// State of one move.
struct Step<'j> {
    step: &'j Move,
    /// Whether the new file is complete and still beside its place.
    is_ready: bool,
    found: Found,
}

/// Finishes the commit of a journal; all its places are locked. `None` if nothing was to be done.
pub(crate) fn finish(
    files: &dyn Files,
    path: &Path,
    journal: &Journal,
) -> Result<Option<Finished>, TensorFileError> {
    let age = Age {
        says_old: journal.says_old(),
        modified_ns: look(files, path)?.map_or(i64::MAX, |look| look.modified_ns),
    };
    // Everything is looked at before anything moves.
    let mut steps = Vec::with_capacity(journal.moves.len());
    for step in &journal.moves {
        let part = look(files, &step.from)?;
        let is_ready =
            part.is_some_and(|look| look.is_trusted && step.sum.is_of(files, &step.from, &look));
        steps.push(Step { step, is_ready, found: found(files, step, &age)? });
    }
    let any = |kind: Found| steps.iter().any(|step| step.found == kind);
    let is_whole = steps.iter().all(|step| step.is_ready && step.found == Found::Old);
    let finished = if any(Found::New) || is_whole {
        complete(files, path, &steps)?
    } else {
        // No reader has seen any of the commit, so it counts as never begun.
        drop_all(files, &steps)
    };
    files.remove_file(path).map_err(io_error(path, "remove"))?;
    remove_pointers(files, &journal.moves);
    Ok(finished)
}

/// Facts by which a file from before the journal is told from one written since.
struct Age {
    /// Whether the journal describes the old files.
    says_old: bool,
    /// Time at which the journal was written, in nanoseconds since 1970.
    modified_ns: i64,
}

fn found(files: &dyn Files, step: &Move, age: &Age) -> Result<Found, TensorFileError> {
    let Some(look) = look(files, &step.to)? else {
        return Ok(if step.old.is_some() { Found::Gone } else { Found::Old });
    };
    if step.sum.is_of(files, &step.to, &look) {
        return Ok(Found::New);
    }
    Ok(match &step.old {
        Some(old) if !old.sum.is_of(files, &step.to, &look) => Found::Changed,
        Some(old) if old.modified_ns != look.modified_ns => Found::Again,
        Some(_) => Found::Old,
        None if age.says_old => Found::Changed,
        // Journals of version 1 know times only.
        None if look.modified_ns > age.modified_ns => Found::Changed,
        None => Found::Old,
    })
}

/// Moves the files that have not taken their places.
fn complete(
    files: &dyn Files,
    path: &Path,
    steps: &[Step<'_>],
) -> Result<Option<Finished>, TensorFileError> {
    let refuse = |reason| Err(TensorFileError::Journal { path: path.to_owned(), reason });
    for Step { step, is_ready, found } in steps {
        let Move { from, to, sum, .. } = step;
        match found {
            Found::Old | Found::Gone if !is_ready => {
                return refuse(format!(
                    "expected {} bytes with xxh3 {} in {} or in {}, found them in neither; {HELP}",
                    sum.len_bytes,
                    Quoted(&sum.xxh3),
                    quoted(from),
                    quoted(to)
                ));
            }
            Found::Again if *is_ready => {
                return refuse(format!(
                    "expected {0} as it was when this step was interrupted, found the same bytes \
                     written again since; remove {0} to have the step completed, or this journal \
                     to keep it",
                    quoted(to)
                ));
            }
            _ => {}
        }
    }
    let (mut moved, mut kept) = (false, None);
    for Step { step, is_ready, found } in steps {
        match found {
            Found::Old | Found::Gone => {
                let told = PathBuf::from(quoted(&step.to));
                files.rename(&step.from, &step.to).map_err(io_error(&told, "replace"))?;
                moved = true;
            }
            // The new file had taken this place before it was changed.
            Found::Changed if !is_ready => {}
            Found::Changed => kept = kept.or(Some(step.to.clone())),
            Found::New | Found::Again => {}
        }
    }
    sync_folders(files, steps.iter().map(|step| step.step.to.as_path()))?;
    remove_parts(files, steps);
    Ok(match (kept, steps.first()) {
        (Some(place), _) => Some(Finished::Kept { place }),
        (None, Some(first)) if moved => Some(Finished::Completed { place: first.step.to.clone() }),
        _ => None,
    })
}

/// Gives up a commit that has no file in its place.
fn drop_all(files: &dyn Files, steps: &[Step<'_>]) -> Option<Finished> {
    // A commit without parts was taken back by the process that began it.
    let is_news = steps.iter().any(|step| step.is_ready);
    remove_parts(files, steps);
    let other = steps.iter().find(|step| step.found != Found::Old || !step.is_ready)?;
    is_news.then(|| Finished::Dropped { place: other.step.to.clone() })
}

/// Removes the parts that take no place.
fn remove_parts(files: &dyn Files, steps: &[Step<'_>]) {
    for Step { step, .. } in steps {
        let own = |look: Look| look.is_trusted && matches!(look.kind, FileKind::File { .. });
        if files.look(&step.from).is_ok_and(own) {
            let _ = files.remove_file(&step.from);
        }
    }
}

/// Removes the pointers to a journal that is over; a pointer that stays leads nowhere.
pub(crate) fn remove_pointers(files: &dyn Files, moves: &[Move]) {
    for step in moves.iter().skip(1) {
        let pointer = journal::pointer_of(&step.to);
        if files.look(&pointer).is_ok() {
            let _ = files.remove_file(&pointer);
        }
    }
}

/// Makes the names in the folders of files durable.
pub(crate) fn sync_folders<'p>(
    files: &dyn Files,
    paths: impl Iterator<Item = &'p Path>,
) -> Result<(), TensorFileError> {
    let mut synced: Vec<PathBuf> = Vec::new();
    for path in paths {
        let folder = place::folder(path);
        if !synced.contains(&folder) {
            let told = PathBuf::from(quoted(path));
            files.sync_folder(&folder).map_err(io_error(&told, "sync its folder"))?;
            synced.push(folder);
        }
    }
    Ok(())
}
