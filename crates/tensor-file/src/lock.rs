//! Locks between processes: empty files, which the system locks. The system lets go of a lock when
//! its process ends, and the holder removes its file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::system;

/// Longest wait for another holder. Saves and short steps take less time, so they take turns.
const WAIT: Duration = Duration::from_secs(10);

/// Time between two tries.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A lock that this process holds.
#[derive(Debug)]
pub(crate) struct FileLock {
    path: PathBuf,
    _file: File,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // The file is removed while the lock is held: a process that waits for the lock sees that
        // the file is gone.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes a lock.
pub(crate) fn take(path: &Path) -> io::Result<FileLock> {
    take_within(path, WAIT, File::try_lock)
}

/// [`take`] with another time to wait and another way to lock.
fn take_within(
    path: &Path,
    wait: Duration,
    try_lock: impl Fn(&File) -> Result<(), TryLockError>,
) -> io::Result<FileLock> {
    let until = Instant::now() + wait;
    loop {
        let (file, is_new) = open(path)?;
        match try_lock(&file) {
            Ok(()) if is_at(&file, path) => {
                return Ok(FileLock { path: path.to_owned(), _file: file });
            }
            // The last holder has removed the file.
            Ok(()) => continue,
            Err(TryLockError::WouldBlock) => {}
            // Without locks in the file system, the process that makes the file has the lock.
            Err(TryLockError::Error(error)) if system::has_no_locks(&error) => {
                if is_new {
                    return Ok(FileLock { path: path.to_owned(), _file: file });
                }
                if Instant::now() >= until {
                    return Err(io::Error::new(
                        ErrorKind::WouldBlock,
                        "this file system has no locks, so whoever was killed leaves the file; \
                         remove it if no other program writes here",
                    ));
                }
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if Instant::now() >= until {
            return Err(ErrorKind::WouldBlock.into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Opens the file at a path, or makes it; the flag says whether it was made.
fn open(path: &Path) -> io::Result<(File, bool)> {
    loop {
        let mut both = OpenOptions::new();
        let opened = match system::open_itself(both.read(true).write(true), path) {
            // The file is that of another user, whose process was killed.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                system::open_itself(OpenOptions::new().read(true), path)
            }
            opened => opened,
        };
        match opened {
            Ok(file) if file.metadata()?.is_file() => return Ok((file, false)),
            Ok(_) => {
                let found = "expected an empty file, or none, found no ordinary file; move it";
                return Err(io::Error::new(ErrorKind::InvalidInput, found));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut new = OpenOptions::new();
        match system::open_itself(new.read(true).write(true).create_new(true), path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether a path still names the file that was opened there.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |found: io::Result<fs::Metadata>| found.ok().map(|found| system::number(&found));
    number(file.metadata()).is_some_and(|own| Some(own) == number(fs::symlink_metadata(path)))
}

/// Removes the file of a lock without a holder; a killed process leaves its file behind.
pub(crate) fn remove_if_free(path: &Path) {
    let Ok(file) = system::open_itself(OpenOptions::new().read(true).write(true), path) else {
        return;
    };
    if file.metadata().is_ok_and(|found| found.is_file() && found.len() == 0)
        && file.try_lock().is_ok()
        && is_at(&file, path)
    {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let again = || take_within(&path, Duration::from_millis(20), File::try_lock);
        let held = again().unwrap();
        assert_eq!(again().unwrap_err().kind(), ErrorKind::WouldBlock);
        remove_if_free(&path);
        assert!(path.exists());
        drop(held);
        assert!(!path.exists());
        // What was left by a holder that was killed keeps nobody out.
        fs::write(&path, b"").unwrap();
        drop(again().unwrap());
        fs::write(&path, b"").unwrap();
        remove_if_free(&path);
        assert!(!path.exists());
    }

    #[test]
    fn many_holders_take_turns() {
        let folder = tempfile::tempdir().unwrap();
        let (path, count) = (folder.path().join("lock"), folder.path().join("count"));
        fs::write(&count, "0").unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let _held = take(&path).unwrap();
                        let number: u32 = fs::read_to_string(&count).unwrap().parse().unwrap();
                        fs::write(&count, (number + 1).to_string()).unwrap();
                    }
                });
            }
        });
        assert_eq!(fs::read_to_string(&count).unwrap(), "400");
    }

    #[cfg(unix)]
    #[test]
    fn where_there_are_no_locks_the_one_who_makes_the_file_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let none = |_: &File| {
            let error = rustix::io::Errno::NOSYS.into();
            Err(TryLockError::Error(error))
        };
        let again = || take_within(&path, Duration::from_millis(20), none);
        let held = again().unwrap();
        let error = again().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(error.to_string().contains("remove it"), "{error}");
        drop(held);
        drop(again().unwrap());
        // What is no file of ours is neither locked nor removed.
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert!(take(&path).is_err());
        assert!(fs::symlink_metadata(&path).is_ok());
    }
}
