//! Notes that ranks of a start leave each other and their launcher, by names of empty files: texts
//! that all have to say are said once, and the launcher hears whether ranks have met.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_128;

use crate::environment::SESSION;
use crate::files::{folders, segment_name};
use crate::starter::{self, STARTER};

/// Whether this process is the first of its start to say `text`. Ranks that `fusestep launch` has
/// started with equal arguments find equal faults in them, and one message serves all.
///
/// Without that launcher every process says what it has to say, as it does where the note that
/// ranks leave each other cannot be made.
pub fn says_first(text: &str) -> bool {
    let note = format!("note-{:032x}", xxh3_128(text.as_bytes()));
    !leave(&note).is_err_and(|error| error.kind() == ErrorKind::AlreadyExists)
}

/// Tells the launcher that the ranks have met.
pub(crate) fn have_met() {
    // Without the note the launcher may say that ranks ran alone, and nothing else.
    let _ = leave(MET);
}

/// Whether ranks of a session that this process has started have met since the last look. Their
/// note is taken away, so that nothing lies about while they work.
pub(crate) fn take_met(session: &str) -> bool {
    std::fs::remove_file(path(session, &starter::own(), MET)).is_ok()
}

/// Removes what ranks of this process's start have left for a launcher that has gone and can look
/// no more.
pub(crate) fn remove_notes() {
    let (Ok(session), Ok(starter)) = (std::env::var(SESSION), std::env::var(STARTER)) else {
        return;
    };
    let [folder, _] = folders();
    let is_note = |name: &str| name.starts_with(&name_of(&session, &starter, "note-"));
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_note) {
            // Another rank may have been faster.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

const MET: &str = "note-met";

/// Leaves a note for this process's start.
fn leave(note: &str) -> io::Result<()> {
    let (Ok(session), Ok(starter)) = (std::env::var(SESSION), std::env::var(STARTER)) else {
        return Ok(());
    };
    OpenOptions::new().write(true).create_new(true).open(path(&session, &starter, note)).map(drop)
}

/// Place of a note.
fn path(session: &str, starter: &str, note: &str) -> PathBuf {
    let [folder, _] = folders();
    folder.join(name_of(session, starter, note))
}

/// Name of a note's file. It has the launcher's process, so that notes of a launcher that was
/// killed are removed with other files of the dead.
fn name_of(session: &str, starter: &str, note: &str) -> String {
    let process = starter.split(' ').next().unwrap_or_default();
    format!("{}.{process}.{note}", segment_name(session))
}
