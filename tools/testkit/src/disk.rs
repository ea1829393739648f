//! A disk in memory that fails, fills up, loses power and rots where a seed says so.

mod processes;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fusestep_tensor_file::{FileKind, Files, Lock, Look};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use self::processes::Seen;

use self::processes::Processes;
use self::tree::{Change, Content, Tree};

/// Nanoseconds by which the clock of a disk goes on with every change.
const TICK_NS: i64 = 1;

/// Fault at a call that would change the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails, and nothing is done.
    Error,
    /// The disk is full from here on, until [`SimulatedDisk::make_room`].
    Full,
    /// The power fails in the middle of the call: every later call fails, until
    /// [`SimulatedDisk::restart`].
    PowerLoss,
}

/// A file system in memory with POSIX's promises and no others.
///
/// A name that was made, renamed or removed survives a loss of power if its folder has been synced
/// since. Any subset of the other changes may survive, too. Bytes survive if the call that wrote
/// them has returned. The seed decides every chance, so a run can be repeated.
#[derive(Debug)]
pub struct SimulatedDisk(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    rng: ChaCha8Rng,
    /// Files and folders that processes see.
    now: Tree,
    /// Files and folders that survive a loss of power.
    durable: Tree,
    /// Changes of names that are not durable yet.
    pending: Vec<Change>,
    faults: BTreeMap<u64, Fault>,
    /// Faults that have happened; a full disk counts every write that finds no room.
    happened: u64,
    calls: u64,
    full: bool,
    dead: bool,
    has_links: bool,
    /// Time in nanoseconds, and the source of the numbers of files: no two changes have the same.
    clock: i64,
    /// Times at which files were last linked or renamed, by the numbers of the files.
    touched: BTreeMap<i64, i64>,
    processes: Processes,
    locks: Arc<Mutex<BTreeSet<PathBuf>>>,
}

/// A lock that a process holds.
#[derive(Debug)]
struct Held {
    path: PathBuf,
    locks: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
    }
}

impl SimulatedDisk {
    /// An empty disk with faults at calls counted from 0.
    pub fn new(seed: u64, faults: impl IntoIterator<Item = (u64, Fault)>) -> Self {
        let mut root = Tree::default();
        root.folders.insert(PathBuf::from("/"));
        Self(Mutex::new(Inner {
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: root.clone(),
            durable: root,
            pending: Vec::new(),
            faults: faults.into_iter().collect(),
            happened: 0,
            calls: 0,
            full: false,
            dead: false,
            has_links: true,
            clock: 0,
            touched: BTreeMap::new(),
            processes: Processes::default(),
            locks: Arc::default(),
        }))
    }

    /// Calls so far that would change something.
    pub fn calls(&self) -> u64 {
        self.inner().calls
    }

    /// Errors, losses of power and writes without room so far.
    pub fn faults(&self) -> u64 {
        self.inner().happened
    }

    /// Adds a fault at a call that is still to come, counted from 0 at the disk's beginning.
    pub fn add_fault(&self, at: u64, fault: Fault) {
        self.inner().faults.insert(at, fault);
    }

    /// Takes back the faults that are still to come.
    pub fn clear_faults(&self) {
        self.inner().faults.clear();
    }

    /// Whether the power is off.
    pub fn is_dead(&self) -> bool {
        self.inner().dead
    }

    /// Gives a full disk room again.
    pub fn make_room(&self) {
        self.inner().full = false;
    }

    /// Takes second names of files from the file system; it refuses them from here on.
    pub fn refuse_links(&self) {
        self.inner().has_links = false;
    }

    /// Lets time pass without a change.
    pub fn pass(&self, time: Duration) {
        let ns = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        self.inner().clock += ns;
    }

    /// Makes the calls from here on those of a process, which begins with its first call. Whether
    /// processes live can be asked of those that are `seen`, and not of those of other machines.
    pub fn act_as(&self, process: u64, seen: Seen) {
        self.inner().processes.act_as(process, seen);
    }

    /// Ends a process: what it was writing is abandoned.
    pub fn end(&self, process: u64) {
        self.inner().processes.end(process);
    }

    /// Starts the machine again with all durable changes and some of the others.
    pub fn restart(&self) {
        let inner = &mut *self.inner();
        for change in std::mem::take(&mut inner.pending) {
            if inner.rng.random_bool(0.5) {
                inner.durable.apply(&change);
            }
        }
        // A file in a folder that is gone is gone, too.
        let folders = &inner.durable.folders;
        let reachable =
            |path: &PathBuf| path.ancestors().skip(1).all(|above| folders.contains(above));
        inner.durable.files.retain(|path, _| reachable(path));
        let folders = folders.clone();
        let reachable =
            |path: &PathBuf| path.ancestors().skip(1).all(|above| folders.contains(above));
        inner.durable.folders.retain(reachable);
        inner.now = inner.durable.clone();
        inner.dead = false;
        // Holders of locks have not lived through the loss of power.
        inner.locks = Arc::default();
        inner.processes.end_all();
    }

    /// Flips one bit of one file, drawn by the seed, and returns the file's path; `None` if all
    /// files are empty.
    pub fn rot(&self) -> Option<PathBuf> {
        let inner = &mut *self.inner();
        let candidates: Vec<PathBuf> = inner
            .now
            .files
            .iter()
            .filter(|(_, content)| !content.bytes.is_empty())
            .map(|(path, _)| path.clone())
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let path = candidates[inner.rng.random_range(0..candidates.len())].clone();
        let rotten = &inner.now.files[&path];
        let mut bytes = rotten.bytes.clone();
        let bit = inner.rng.random_range(0..bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let (written, is_foreign) = (rotten.written, rotten.is_foreign);
        let bytes = Arc::new(Content { bytes, written, is_foreign });
        inner.now.files.insert(path.clone(), bytes.clone());
        inner.durable.files.insert(path.clone(), bytes);
        Some(path)
    }

    /// Writes a file as another program does, in place or anew, and to disk at once.
    pub fn overwrite(&self, path: &Path, bytes: &[u8]) {
        let inner = &mut *self.inner();
        let content = inner.content(bytes.to_vec());
        inner.put(path, content);
    }

    /// Writes a file as [`Self::overwrite`] does, but for another user, who then owns it.
    pub fn plant(&self, path: &Path, bytes: &[u8]) {
        let inner = &mut *self.inner();
        inner.clock += TICK_NS;
        let (bytes, written) = (bytes.to_vec(), inner.clock);
        inner.put(path, Arc::new(Content { bytes, written, is_foreign: true }));
    }

    /// Paths of all files that processes see.
    pub fn files(&self) -> Vec<PathBuf> {
        self.inner().now.files.keys().cloned().collect()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Counts a call that would change something, and lets a fault due at this call happen. A loss
    /// of power may leave the change `torn`.
    fn enter(&mut self, torn: Option<Change>) -> io::Result<()> {
        let number = self.calls;
        self.calls += 1;
        if self.dead {
            return Err(io::Error::other("the power is off"));
        }
        match self.faults.get(&number) {
            None => Ok(()),
            Some(Fault::Error) => {
                self.happened += 1;
                Err(io::Error::other("a fault of the disk"))
            }
            Some(Fault::Full) => {
                self.full = true;
                Ok(())
            }
            Some(Fault::PowerLoss) => {
                self.happened += 1;
                self.pending.extend(torn);
                self.dead = true;
                Err(io::Error::other("the power is off"))
            }
        }
    }

    fn change(&mut self, change: Change) {
        self.now.apply(&change);
        self.pending.push(change);
    }

    fn readable(&self) -> io::Result<()> {
        if self.dead { Err(io::Error::other("the power is off")) } else { Ok(()) }
    }

    fn require_parent(&self, path: &Path) -> io::Result<()> {
        match path.parent() {
            Some(parent) if self.now.folders.contains(parent) => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// A new file.
    fn content(&mut self, bytes: Vec<u8>) -> Arc<Content> {
        self.clock += TICK_NS;
        Arc::new(Content { bytes, written: self.clock, is_foreign: false })
    }

    /// Puts a file at a path, now and after a loss of power.
    fn put(&mut self, path: &Path, content: Arc<Content>) {
        self.now.files.insert(path.to_owned(), content.clone());
        self.pending.retain(|change| !change.is_of(path));
        self.durable.files.insert(path.to_owned(), content);
    }

    /// Notes that a file has got another name.
    fn touch(&mut self, content: &Content) {
        self.clock += TICK_NS;
        self.touched.insert(content.written, self.clock);
    }

    fn file(&self, path: &Path) -> io::Result<Arc<Content>> {
        match self.now.files.get(path) {
            Some(bytes) => Ok(bytes.clone()),
            None if self.now.folders.contains(path) => Err(io::ErrorKind::InvalidInput.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Files for SimulatedDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let inner = self.inner();
        inner.readable()?;
        inner.file(path).map(|content| content.bytes.clone())
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        let inner = self.inner();
        inner.readable()?;
        if inner.now.folders.contains(path) {
            return Ok(FileKind::Folder);
        }
        let len_bytes = inner.file(path)?.bytes.len() as u64;
        Ok(FileKind::File { len_bytes })
    }

    fn look(&self, path: &Path) -> io::Result<Look> {
        let kind = self.kind(path)?;
        let inner = self.inner();
        let content = inner.now.files.get(path);
        let written = content.map_or(0, |content| content.written);
        let is_trusted = content.is_none_or(|content| !content.is_foreign);
        Ok(Look { kind, modified_ns: written, number: written.unsigned_abs(), is_trusted })
    }

    fn lock(&self, path: &Path) -> io::Result<Lock> {
        let inner = self.inner();
        inner.readable()?;
        let locks = Arc::clone(&inner.locks);
        if !locks.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Held { path: path.to_owned(), locks }))
    }

    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let inner = &mut *self.inner();
        // A single draw whatever the length, since the bytes may hold a process's number.
        let len = (inner.rng.random::<f64>() * (bytes.len() + 1) as f64) as usize;
        let len = len.min(bytes.len());
        let torn = inner.content(bytes[..len].to_vec());
        let part = Change::Make(path.to_owned(), torn);
        inner.processes.note(path);
        inner.enter(Some(part.clone()))?;
        inner.require_parent(path)?;
        if inner.now.files.contains_key(path) || inner.now.folders.contains(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if inner.full {
            inner.happened += 1;
            inner.change(part);
            return Err(io::ErrorKind::StorageFull.into());
        }
        let whole = inner.content(bytes.to_vec());
        inner.change(Change::Make(path.to_owned(), whole));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        let bytes = inner.file(from);
        let change = |content| Change::Rename(from.to_owned(), to.to_owned(), content);
        inner.enter(bytes.as_ref().ok().cloned().map(change))?;
        inner.require_parent(to)?;
        if inner.now.folders.contains(to) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let content = bytes?;
        inner.touch(&content);
        inner.change(change(content));
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        if !inner.has_links {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let content = inner.file(from);
        let made = |content| Change::Make(to.to_owned(), content);
        inner.processes.note(to);
        inner.enter(content.as_ref().ok().cloned().map(made))?;
        inner.require_parent(to)?;
        let content = content?;
        inner.touch(&content);
        inner.change(made(content));
        Ok(())
    }

    fn lives(&self, part: &Path) -> Option<bool> {
        self.inner().processes.lives(part)
    }

    fn age(&self, path: &Path) -> io::Result<Duration> {
        let inner = self.inner();
        inner.readable()?;
        let ns = inner.clock - inner.file(path)?.written;
        Ok(Duration::from_nanos(ns.unsigned_abs()))
    }

    fn touched_ns(&self, path: &Path) -> io::Result<i64> {
        let inner = self.inner();
        inner.readable()?;
        let written = inner.file(path)?.written;
        Ok(inner.touched.get(&written).copied().unwrap_or(written))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        inner.enter(None)?;
        let pending = std::mem::take(&mut inner.pending);
        for change in pending {
            if change.is_in(path) {
                inner.durable.apply(&change);
            } else {
                inner.pending.push(change);
            }
        }
        Ok(())
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        inner.enter(None)?;
        let mut missing: Vec<PathBuf> = path.ancestors().map(Path::to_owned).collect();
        missing.reverse();
        for folder in missing {
            if inner.now.files.contains_key(&folder) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if !inner.now.folders.contains(&folder) {
                inner.change(Change::MakeFolder(folder));
            }
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let inner = self.inner();
        inner.readable()?;
        if !inner.now.folders.contains(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let all = inner.now.files.keys().chain(&inner.now.folders);
        let within = all.filter(|found| found.parent() == Some(path));
        let name = |found: &PathBuf| Some(found.file_name()?.to_str()?.to_owned());
        Ok(within.filter_map(name).collect())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        let change = Change::Remove(path.to_owned());
        inner.enter(Some(change.clone()))?;
        inner.file(path)?;
        inner.change(change);
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.inner();
        let change = Change::RemoveFolder(path.to_owned());
        inner.enter(None)?;
        let all = inner.now.files.keys().chain(&inner.now.folders);
        if all.clone().any(|found| found.parent() == Some(path)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        if !inner.now.folders.contains(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        inner.change(change);
        Ok(())
    }
}
