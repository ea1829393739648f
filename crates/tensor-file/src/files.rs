//! The interface of a file system for saving and loading; a simulation or a fault can stand in for
//! a disk here.

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use crate::TensorFileError;
use crate::error::{io_error, is_missing};

/// Kind of a thing at a path; links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// An ordinary file.
    File {
        /// Length of the file.
        len_bytes: u64,
    },
    /// A folder.
    Folder,
    /// A pipe, a socket or a device.
    Other,
}

/// State of a thing at a path; a link there is itself [`FileKind::Other`], wherever it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Kind of the thing.
    pub kind: FileKind,
    /// Time of the last change of its content, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// The number by which the file system knows the file; another file in its place has another
    /// number.
    pub number: u64,
    /// Whether this user or the superuser owns the file.
    pub is_trusted: bool,
}

/// A lock that is held until it is dropped or its process ends.
pub type Lock = Box<dyn Debug + Send + Sync>;

/// A file system, as far as saving and loading need one.
///
/// The promises are POSIX's. Bytes from [`Files::write_new`] are on disk when it returns, and the
/// file's name once [`Files::sync_folder`] has returned. [`Files::rename`] replaces a file in one
/// step.
pub trait Files: Send + Sync + Debug {
    /// Reads all bytes of an ordinary file. Pipes and devices are refused rather than waited for,
    /// and so is a file that changes meanwhile.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::InvalidInput`] for a path that is no ordinary file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// The xxh3 of all bytes of an ordinary file.
    ///
    /// # Errors
    /// As [`Files::read`].
    fn xxh3(&self, path: &Path) -> io::Result<u64> {
        self.read(path).map(|bytes| xxh3_64(&bytes))
    }

    /// The kind of thing at a path.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::NotFound`] if nothing is there.
    fn kind(&self, path: &Path) -> io::Result<FileKind>;

    /// The state of the thing at a path; links are not followed.
    ///
    /// # Errors
    /// As [`Files::kind`].
    fn look(&self, path: &Path) -> io::Result<Look>;

    /// Keeps every other holder of the lock of this path out, in this process and in others. Waits
    /// a moment if another holder has it.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::WouldBlock`] while another holder has the lock.
    fn lock(&self, path: &Path) -> io::Result<Lock>;

    /// Writes a new file and its bytes to disk; the file must not be there yet.
    ///
    /// # Errors
    /// Those of the system; after one, part of the file may be there.
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Puts a file in place of another, or of none, in one step.
    ///
    /// # Errors
    /// Those of the system; after one, both files are as they were.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file a second name.
    ///
    /// # Errors
    /// Those of the system; some file systems have no second names.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file the permissions of another, in a file system that has permissions.
    ///
    /// # Errors
    /// Those of the system.
    fn keep_mode(&self, _of: &Path, _on: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Writes the names in a folder to disk.
    ///
    /// # Errors
    /// Those of the system.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder and those above it, unless they are there.
    ///
    /// # Errors
    /// Those of the system.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// The names in a folder, in any order. Names that are not UTF-8 are left out, since no program
    /// of this library has written them.
    ///
    /// # Errors
    /// Those of the system.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Removes a file.
    ///
    /// # Errors
    /// Those of the system.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Whether the process that has written a part, by the part's name, lives; `None` if the system
    /// does not tell.
    fn lives(&self, _part: &Path) -> Option<bool> {
        None
    }

    /// Time since a file was last written.
    ///
    /// # Errors
    /// Those of the system; some file systems have no times.
    fn age(&self, _path: &Path) -> io::Result<Duration> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Time of the last change of a file, of its names or of its permissions, in nanoseconds since
    /// 1970. A file that leaves its place and comes back differs in this alone.
    ///
    /// # Errors
    /// As [`Files::kind`].
    fn touched_ns(&self, path: &Path) -> io::Result<i64> {
        self.look(path).map(|look| look.modified_ns)
    }

    /// Removes the file of a lock without a holder, in file systems where locks are files.
    fn remove_free_lock(&self, _lock: &Path) {}

    /// Removes an empty folder.
    ///
    /// # Errors
    /// Those of the system; a folder with anything in it stays.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file at a place, if there is one.
pub(crate) fn look(files: &dyn Files, target: &Path) -> Result<Option<Look>, TensorFileError> {
    match files.look(target) {
        Ok(look) => Ok(Some(look)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(io_error(target, "look at it")(error)),
    }
}
