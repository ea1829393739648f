//! What saving and loading ask of a file system: the seam at which a simulation, or a fault, stands
//! in for a disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::part;

/// What lies at a path; links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// An ordinary file of so many bytes.
    File {
        /// Its length.
        len_bytes: u64,
    },
    /// A folder.
    Folder,
    /// A pipe, a socket or a device.
    Other,
}

/// A file system, as far as saving and loading need one.
///
/// The promises are POSIX's: what [`Files::write_new`] has written is on disk when it returns, its
/// name is once [`Files::sync_folder`] has returned, and [`Files::rename`] replaces in one step.
pub trait Files: Send + Sync + std::fmt::Debug {
    /// All bytes of an ordinary file; anything else is refused rather than waited for.
    ///
    /// # Errors
    /// What the system says; [`io::ErrorKind::InvalidInput`] for what is no ordinary file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// What lies at a path.
    ///
    /// # Errors
    /// What the system says; [`io::ErrorKind::NotFound`] if nothing does.
    fn kind(&self, path: &Path) -> io::Result<FileKind>;

    /// Writes a file that must not be there yet, and its bytes to disk.
    ///
    /// # Errors
    /// What the system says; part of the file may be there then.
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Puts a file in place of another, or of none, in one step.
    ///
    /// # Errors
    /// What the system says; both are as they were then.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file a second name.
    ///
    /// # Errors
    /// What the system says; some file systems have no second names.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file the permissions of another, where there are any.
    ///
    /// # Errors
    /// What the system says.
    fn keep_mode(&self, _of: &Path, _on: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Writes the names in a folder to disk.
    ///
    /// # Errors
    /// What the system says.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder, and those above it, unless it is there.
    ///
    /// # Errors
    /// What the system says.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// The names in a folder, in any order; names that are not UTF-8 are left out, since nothing
    /// here has written them.
    ///
    /// # Errors
    /// What the system says.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Removes a file.
    ///
    /// # Errors
    /// What the system says.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes what processes that are dead were writing in a folder, where processes can be asked
    /// about; what cannot be removed costs space only.
    fn remove_abandoned(&self, _folder: &Path) {}

    /// Removes an empty folder.
    ///
    /// # Errors
    /// What the system says; a folder with anything in it stays.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The machine's own file systems.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Files for Disk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        // Looked at before it is opened: opening a pipe waits for a writer.
        if !fs::metadata(path)?.is_file() {
            return Err(no_file());
        }
        let mut file = File::open(path)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(no_file());
        }
        let mut bytes = Vec::new();
        // A length that memory cannot hold is an error and not the end of the process.
        let len_bytes = usize::try_from(found.len()).unwrap_or(usize::MAX);
        bytes
            .try_reserve_exact(len_bytes)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        let found = fs::metadata(path)?;
        Ok(if found.is_file() {
            FileKind::File { len_bytes: found.len() }
        } else if found.is_dir() {
            FileKind::Folder
        } else {
            FileKind::Other
        })
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

    fn remove_abandoned(&self, folder: &Path) {
        part::remove_abandoned(folder);
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

fn no_file() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        "no ordinary file but a folder, pipe, socket or device",
    )
}
