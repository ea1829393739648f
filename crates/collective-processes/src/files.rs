//! The names that a session has in the file system while its ranks come.

use std::fs::{DirEntry, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::geteuid;
use xxhash_rust::xxh3::xxh3_128;

use crate::ProcessError;
use crate::life::Life;
use crate::made::creator;

/// Folder of the system's shared memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// Folders in which a session may lie, the best place first.
pub(crate) fn folders() -> [PathBuf; 2] {
    [PathBuf::from(SHARED_MEMORY), std::env::temp_dir()]
}

/// Beginning of the names of all sessions' files.
const PREFIX: &str = "fusestep-";

/// How long a new file may be without a lock, which tells that a living process has the file.
const JUST_NOW: Duration = Duration::from_secs(1);

/// The name of a session's files, or its beginning.
pub(crate) fn segment_name(session: &str) -> String {
    format!("{PREFIX}{:032x}", xxh3_128(session.as_bytes()))
}

/// Removes files that dead processes of a session have left; for launchers, when all have ended.
pub(crate) fn remove_leftovers(session: &str) {
    let name = segment_name(session);
    for folder in folders() {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        for entry in entries {
            let is_ours = |found: &str| found.starts_with(&name);
            if entry.file_name().to_str().is_some_and(is_ours) {
                // Another process may have been faster.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Process that has made a file of a session, as its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    /// This process.
    Process(u32),
    /// The process that the file itself names.
    Within,
}

/// The maker of a session's file; `None` for any other name.
fn maker(name: &str) -> Option<Maker> {
    let mut words = name.strip_prefix(PREFIX)?.split('.');
    let sum = words.next()?;
    let is_sum = sum.len() == 32 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
    let maker = match words.next() {
        None => Maker::Within,
        Some(process) => Maker::Process(process.parse().ok()?),
    };
    let is_kind = |word: &str| word == "2" || word.starts_with("note-");
    let is_whole = words.next().is_none_or(is_kind) && words.next().is_none();
    (is_sum && is_whole).then_some(maker)
}

/// Removes from a folder the files of sessions whose processes were killed before all had come.
/// Each of several signs must say so. Files of other users and of living processes stay, also files
/// that a process in another container has mapped.
pub(crate) fn remove_of_dead(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let of_dead = || {
            let name = entry.file_name();
            let maker = maker(name.to_str()?)?;
            let is_dead = match maker {
                Maker::Process(process) => !Path::new("/proc").join(process.to_string()).exists(),
                Maker::Within => !creator(&entry.path())?.is_alive(),
            };
            (is_dead && is_nobodys(&entry).ok()?).then_some(())
        };
        if of_dead().is_some() {
            // Another process may have been faster.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a file is this user's, was not made just now, and is locked by no process.
fn is_nobodys(entry: &DirEntry) -> io::Result<bool> {
    let found = entry.metadata()?;
    let age = found.modified()?.elapsed().unwrap_or_default();
    if !found.is_file() || found.uid() != geteuid().as_raw() || age < JUST_NOW {
        return Ok(false);
    }
    let mut options = OpenOptions::new();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits() as i32);
    let file = options.open(entry.path())?;
    Ok(file.metadata()?.ino() == found.ino() && file.try_lock().is_ok())
}

/// Names that were given to files, to be taken back.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// The names, each with the number of its file, since the name may belong to another file by
    /// now.
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
            // A file of a dead process is nobody's. It may be gone by now.
            let _ = std::fs::remove_file(public);
            std::fs::hard_link(hidden, public)?;
        }
        if let Some((path, _)) = self.given.iter_mut().find(|(path, _)| path == hidden) {
            *path = public.to_owned();
        }
        std::fs::remove_file(hidden)
    }

    /// Removes the names.
    pub(crate) fn remove(&self) {
        for (path, number) in &self.given {
            if std::fs::metadata(path).is_ok_and(|data| data.ino() == *number) {
                // Another rank may have been faster.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Error of the system, with what would help.
pub(crate) fn system(what: String, error: &io::Error) -> ProcessError {
    let helps = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOMEM) => {
            "; raise the limit on a process's address space (ulimit -v), of which each rank maps \
             some GiB, or start fewer ranks"
        }
        Some(Errno::MFILE) => "; raise the limit on open files (ulimit -n)",
        Some(Errno::NFILE) => "; the machine has no open file left",
        Some(Errno::NOSPC | Errno::DQUOT) => {
            "; make room in /dev/shm (docker: --shm-size), or set TMPDIR to a folder with more"
        }
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
            "; start all ranks as one user, who may write to /dev/shm or to the folder of TMPDIR"
        }
        _ => "",
    };
    ProcessError::System { what, reason: format!("{error}{helps}") }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_the_system_refuses_is_told_with_what_helps() {
        for (code, helps) in [
            (Errno::NOMEM, "ulimit -v"),
            (Errno::MFILE, "ulimit -n"),
            (Errno::NFILE, "the machine has no open file left"),
            (Errno::NOSPC, "--shm-size"),
            (Errno::ACCESS, "one user"),
        ] {
            let error = system("open x".to_owned(), &code.into()).to_string();
            assert!(error.contains("open x: ") && error.contains(helps), "{error}");
        }
    }

    #[test]
    fn names_of_sessions_are_known() {
        let name = segment_name("x");
        for (name, known) in [
            (name.clone(), Some(Maker::Within)),
            (format!("{name}.17"), Some(Maker::Process(17))),
            (format!("{name}.17.2"), Some(Maker::Process(17))),
            (format!("{name}.17.3"), None),
            (format!("{name}.17.2.bak"), None),
            (format!("{name}.log"), None),
            ("fusestep-0".to_owned(), None),
            ("other".to_owned(), None),
        ] {
            assert_eq!(maker(&name), known, "{name}");
        }
    }

    #[test]
    fn what_dead_sessions_have_left_goes_and_what_anybody_has_stays() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (dead, own) = (child.id(), std::process::id());
        let name = |session: &str, rest: String| folder.path().join(segment_name(session) + &rest);
        let make = |path: &Path, age: u64| {
            let file = File::create(path).unwrap();
            let then = SystemTime::now() - Duration::from_secs(age);
            file.set_modified(then).unwrap();
            file
        };
        let gone = [name("a", format!(".{dead}")), name("b", format!(".{dead}.2"))];
        let mapped = name("c", format!(".{dead}.2"));
        let new = name("d", format!(".{dead}"));
        let living = name("e", format!(".{own}"));
        let unknown = name("f", String::new());
        let foreign = folder.path().join("fusestep-notes");
        for path in gone.iter().chain([&living, &unknown, &foreign]) {
            make(path, 60);
        }
        make(&new, 0);
        let held = make(&mapped, 60);
        held.try_lock_shared().unwrap();
        remove_of_dead(folder.path());
        assert!(gone.iter().all(|path| !path.exists()));
        for path in [&mapped, &new, &living, &unknown, &foreign] {
            assert!(path.exists(), "{}", path.display());
        }
        drop(held);
        remove_of_dead(folder.path());
        assert!(!mapped.exists());
    }
}
