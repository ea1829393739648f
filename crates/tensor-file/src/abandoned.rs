//! Removal of the parts that dead processes have left in a folder, except those that a journal has
//! to finish.

use std::collections::HashSet;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use crate::part::{self, JOURNAL, LOCK, POINTER, PREFIX, READY, READY_ELSEWHERE, SUFFIX};
use crate::{Disk, FileKind, Files, journal, place};

/// Age at which a part counts as left behind, if its process cannot be asked about: it ran on
/// another machine or in another container.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Removes parts that dead processes were writing in a folder, except those that a journal there or
/// elsewhere has to finish. A part that cannot be removed costs space only.
pub fn remove_abandoned(folder: &Path) {
    remove_abandoned_in(&Disk, folder);
}

/// [`remove_abandoned`] in any file system.
pub fn remove_abandoned_in(files: &dyn Files, folder: &Path) {
    let Some(names) = hidden_names(files, folder) else {
        return;
    };
    let abandoned = |name: &&String| is_abandoned(files, &folder.join(name), name);
    let abandoned: Vec<&String> = names.iter().filter(abandoned).collect();
    // A process can put a journal there until its death, so journals are listed once the process
    // is known to be dead.
    let needed = if abandoned.is_empty() { None } else { writers_in_journals(files, folder) };
    if let Some(needed) = needed {
        for name in abandoned.iter().filter(|name| !needed.contains(part::writer_words(name))) {
            let _ = files.remove_file(&folder.join(name));
        }
    }
    for name in names.iter().filter(|name| name.ends_with(LOCK)) {
        files.remove_free_lock(&folder.join(name));
    }
}

/// The names of this library's files in a folder; `None` if they cannot be listed.
fn hidden_names(files: &dyn Files, folder: &Path) -> Option<Vec<String>> {
    let mut names = files.list(folder).ok()?;
    names.retain(|name| name.starts_with(PREFIX));
    Some(names)
}

/// Whether a file is a part whose process is dead, as far as the system tells.
fn is_abandoned(files: &dyn Files, path: &Path, name: &str) -> bool {
    let is_old = || files.age(path).is_ok_and(|age| age > ABANDONED_AFTER);
    if name.ends_with(READY_ELSEWHERE) {
        // Journals of version 1 have no pointers, and nothing here leads to them.
        return is_old() && files.lives(path) != Some(true);
    }
    (name.ends_with(SUFFIX) || name.ends_with(READY))
        && files.lives(path).map_or_else(is_old, |lives| !lives)
}

/// The writers of parts in the journals of a folder and in those to which pointers there lead;
/// `None` if one of these journals cannot be read, since it may name any part. All parts of such a
/// writer are needed: the other ones are old files under second names.
fn writers_in_journals(files: &dyn Files, folder: &Path) -> Option<HashSet<String>> {
    let mut writers = HashSet::new();
    for name in hidden_names(files, folder)? {
        let text = if name.ends_with(JOURNAL) {
            read_small(files, &folder.join(name)).ok()?
        } else if name.ends_with(POINTER) {
            journal_of_pointer(files, &folder.join(name))?
        } else {
            None
        };
        add_writers(&text.unwrap_or_default(), &mut writers);
    }
    Some(writers)
}

/// The bytes of the journal to which a pointer leads; the inner `None` if the journal is over, the
/// outer one if nobody can tell.
fn journal_of_pointer(files: &dyn Files, pointer: &Path) -> Option<Option<Vec<u8>>> {
    let text = read_small(files, pointer).ok()?.unwrap_or_default();
    let Some(path) = journal::in_pointer(&text) else {
        return Some(None);
    };
    let text = read_small(files, &path).ok()?;
    // Without its folder, which may be out of reach for now, a journal is not known to be over.
    let is_known = text.is_some() || files.kind(&place::folder(&path)).is_ok();
    is_known.then_some(text)
}

/// The bytes of a journal or pointer. `None` without one, for a pipe or device, which could be
/// waited for without end, and for a file too long for a journal.
fn read_small(files: &dyn Files, path: &Path) -> io::Result<Option<Vec<u8>>> {
    let text = match files.kind(path) {
        Ok(FileKind::File { len_bytes }) if len_bytes <= part::MAX_JOURNAL_BYTES => {
            files.read(path).map(Some)
        }
        Ok(_) => Ok(None),
        Err(error) => Err(error),
    };
    text.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(None) } else { Err(error) })
}

/// Adds the writers of all parts that a journal's text names.
fn add_writers(text: &[u8], writers: &mut HashSet<String>) {
    let in_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let words = text.split(|&byte| !in_name(byte)).filter_map(|word| str::from_utf8(word).ok());
    let parts = words.filter(|word| word.starts_with(PREFIX));
    writers.extend(parts.map(|name| part::writer_words(name).to_owned()));
}

#[cfg(test)]
mod tests;
