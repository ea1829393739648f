//! The machine's own file systems.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::Xxh3;

use crate::{FileKind, Files, Lock, Look, lock, part, system};

/// Longest time between two ticks of the clock by which file systems date changes. Of two changes
/// within one tick only one shows.
const TICK: Duration = Duration::from_millis(12);

/// Bytes read at once where the whole file is not kept in memory.
const STRETCH_BYTES: usize = 1 << 20;

/// The machine's own file systems.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Files for Disk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let mut file = open(path)?;
        let before = Before::of(&file)?;
        let bytes = before.read(&mut file)?;
        before.require_same(&file)?;
        Ok(bytes)
    }

    fn xxh3(&self, path: &Path) -> io::Result<u64> {
        let mut file = open(path)?;
        let before = Before::of(&file)?;
        let (mut sum, mut stretch) = (Xxh3::new(), vec![0; STRETCH_BYTES]);
        loop {
            match file.read(&mut stretch)? {
                0 => break,
                count => sum.update(&stretch[..count]),
            }
        }
        before.require_same(&file)?;
        Ok(sum.digest())
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        fs::metadata(path).map(|found| kind_of(&found))
    }

    fn look(&self, path: &Path) -> io::Result<Look> {
        let found = fs::symlink_metadata(path)?;
        Ok(Look {
            kind: kind_of(&found),
            modified_ns: system::modified_ns(&found),
            number: system::number(&found),
            is_trusted: system::is_trusted(&found),
        })
    }

    fn lock(&self, path: &Path) -> io::Result<Lock> {
        Ok(Box::new(lock::take(path)?))
    }

    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn keep_mode(&self, of: &Path, on: &Path) -> io::Result<()> {
        fs::set_permissions(on, fs::metadata(of)?.permissions())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(path)? {
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn lives(&self, part: &Path) -> Option<bool> {
        part::writer_lives(part.file_name()?.to_str()?)
    }

    fn age(&self, path: &Path) -> io::Result<Duration> {
        let written = fs::symlink_metadata(path)?.modified()?;
        // A clock may have been set back since.
        Ok(SystemTime::now().duration_since(written).unwrap_or_default())
    }

    fn touched_ns(&self, path: &Path) -> io::Result<i64> {
        fs::symlink_metadata(path).map(|found| system::touched_ns(&found))
    }

    fn remove_free_lock(&self, lock: &Path) {
        lock::remove_if_free(lock);
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

fn kind_of(found: &Metadata) -> FileKind {
    if found.is_file() {
        FileKind::File { len_bytes: found.len() }
    } else if found.is_dir() {
        FileKind::Folder
    } else {
        FileKind::Other
    }
}

/// Opens an ordinary file for reading.
fn open(path: &Path) -> io::Result<File> {
    // The path is checked before it is opened: opening a pipe waits for a writer, and opening a
    // device may start it.
    if !fs::metadata(path)?.is_file() {
        return Err(no_file());
    }
    let file = system::open_at_once(OpenOptions::new().read(true), path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(no_file()) }
}

/// A file as it was before it was read.
struct Before {
    found: Metadata,
    /// Whether the file changed so recently that another change may leave its time as it is.
    is_recent: bool,
}

impl Before {
    fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        let age = found.modified().map(|at| SystemTime::now().duration_since(at));
        let is_recent = !matches!(age, Ok(Ok(age)) if age > TICK);
        Ok(Self { found, is_recent })
    }

    fn len_bytes(&self) -> u64 {
        self.found.len()
    }

    /// Reads the file, twice if a change might not show in its times.
    fn read(&self, file: &mut (impl Read + Seek)) -> io::Result<Vec<u8>> {
        let bytes = read_all(file, self.len_bytes())?;
        if self.is_recent {
            file.rewind()?;
            if read_all(file, self.len_bytes())? != bytes {
                return Err(changed());
            }
        }
        Ok(bytes)
    }

    fn require_same(&self, file: &File) -> io::Result<()> {
        let version = |found: &Metadata| (found.len(), system::modified_ns(found));
        if version(&file.metadata()?) == version(&self.found) { Ok(()) } else { Err(changed()) }
    }
}

/// Reads a file of `len_bytes` bytes; a file with fewer or more is refused.
fn read_all(file: &mut impl Read, len_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // A length that memory cannot hold is an error and not the end of the process.
    bytes
        .try_reserve_exact(usize::try_from(len_bytes).unwrap_or(usize::MAX))
        .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    file.by_ref().take(len_bytes).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < len_bytes {
        return Err(io::Error::other(format!(
            "expected {len_bytes} bytes, as long as it is said to be, found {}; it has become \
             shorter meanwhile, or is none that is kept on a disk",
            bytes.len()
        )));
    }
    match file.read(&mut [0]) {
        Ok(0) => Ok(bytes),
        _ if len_bytes == 0 => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "no ordinary file but one that is said to be empty and is not, as those of /proc",
        )),
        Ok(_) => Err(changed()),
        Err(error) => Err(error),
    }
}

fn changed() -> io::Error {
    io::Error::other(
        "another program changed it while it was read; try again once that program is done",
    )
}

fn no_file() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        "no ordinary file but a folder, pipe, socket or device",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changes_while_it_is_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p");
        for (len, text) in [(3, "abc"), (5, "abcde"), (2, "ab")] {
            fs::write(&path, "xyz").unwrap();
            let mut file = open(&path).unwrap();
            // Long enough ago that the time alone tells.
            let long_ago = SystemTime::now() - Duration::from_secs(5);
            OpenOptions::new().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
            let before = Before::of(&file).unwrap();
            assert!(!before.is_recent);
            fs::write(&path, text).unwrap();
            let found = read_all(&mut file, before.len_bytes());
            assert_eq!(found.is_ok(), len == 3, "{found:?}");
            let error = before.require_same(&file).unwrap_err().to_string();
            assert!(error.contains("another program changed it"), "{error}");
        }
    }

    #[test]
    fn what_was_just_written_or_is_dated_ahead_is_recent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p");
        let file = File::create(&path).unwrap();
        // A clock that is ahead tells nothing of when it was.
        file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        assert!(Before::of(&file).unwrap().is_recent);
        file.set_modified(SystemTime::now() - 2 * TICK).unwrap();
        assert!(!Before::of(&file).unwrap().is_recent);
    }

    /// A file that another program changes behind the first reading, within a tick of the clock.
    struct Rewritten {
        now: io::Cursor<&'static [u8]>,
        later: &'static [u8],
    }

    impl Read for Rewritten {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.now.read(bytes)
        }
    }

    impl Seek for Rewritten {
        fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
            self.now = io::Cursor::new(self.later);
            self.now.seek(to)
        }
    }

    #[test]
    fn a_change_within_a_tick_of_the_clock_shows_between_two_readings() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("p")).unwrap();
        file.set_len(3).unwrap();
        for (later, same) in [(&b"abc"[..], true), (b"abd", false), (b"ab", false)] {
            for is_recent in [true, false] {
                let before = Before { is_recent, ..Before::of(&file).unwrap() };
                let mut file = Rewritten { now: io::Cursor::new(b"abc"), later };
                assert_eq!(before.read(&mut file).is_ok(), same || !is_recent);
            }
        }
    }
}
