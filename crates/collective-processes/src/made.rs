//! Files of sessions as their makers leave them: how they are opened, and who made them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::layout::{MAGIC, Process, SessionHead};
use crate::life::Life;
use crate::segment::Segment;
use crate::session::life_in;

/// Opens a file of a session, or makes it.
pub(crate) fn file(path: &Path, is_new: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(is_new).mode(0o600);
    let file = options.open(path)?;
    // The lock is held as long as any process has the file mapped: a file that nobody holds is left
    // over.
    let _ = file.try_lock_shared();
    Ok(file)
}

/// The head of a session's first file and, behind it, the process of rank 0; `None` where the file
/// is no session's. The whole file may be longer than a process may map.
pub(crate) fn map_head(first: &File) -> io::Result<Option<Segment>> {
    let len_bytes = size_of::<SessionHead>() + size_of::<Process>();
    if first.metadata()?.size() < len_bytes as u64 {
        return Ok(None);
    }
    let segment = Segment::map_head(first.try_clone()?, len_bytes)?;
    let head: &SessionHead = segment.at(0);
    let is_session = head.magic.load(Ordering::SeqCst) == MAGIC;
    Ok(is_session.then_some(segment))
}

/// Process that has made the file at `path`.
pub(crate) fn creator(path: &Path) -> Option<Life> {
    let segment = map_head(&file(path, false).ok()?).ok()??;
    let process: &Process = segment.at(size_of::<SessionHead>() as u64);
    life_in(&process.0)
}
