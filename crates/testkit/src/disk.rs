//! A disk in memory that fails, fills up, loses power and rots where a seed says so.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep_tensor_file::{FileKind, Files};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What happens at a call that would change the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails, and nothing is done.
    Error,
    /// The disk is full from here on, until [`SimulatedDisk::make_room`].
    Full,
    /// The power fails in the middle of it: every later call fails, until
    /// [`SimulatedDisk::restart`].
    PowerLoss,
}

/// A file system in memory with POSIX's promises and no others.
///
/// A name (made, renamed, removed) survives a loss of power if its folder has been synced since;
/// any subset of the other changes may. Bytes survive if the call that wrote them has returned.
/// Every chance is drawn from the seed, so a run can be repeated.
#[derive(Debug)]
pub struct SimulatedDisk(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    rng: ChaCha8Rng,
    /// What a process sees.
    now: Tree,
    /// What is there after a loss of power.
    durable: Tree,
    /// Changes of names that are not durable yet.
    pending: Vec<Change>,
    faults: BTreeMap<u64, Fault>,
    /// Those that have happened: a full disk counts with every write that finds no room.
    happened: u64,
    calls: u64,
    full: bool,
    dead: bool,
}

#[derive(Clone, Debug, Default)]
struct Tree {
    files: BTreeMap<PathBuf, Arc<Vec<u8>>>,
    folders: BTreeSet<PathBuf>,
}

#[derive(Clone, Debug)]
enum Change {
    Make(PathBuf, Arc<Vec<u8>>),
    MakeFolder(PathBuf),
    Rename(PathBuf, PathBuf, Arc<Vec<u8>>),
    Remove(PathBuf),
    RemoveFolder(PathBuf),
}

impl Tree {
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Make(path, bytes) => {
                self.files.insert(path.clone(), bytes.clone());
            }
            Change::MakeFolder(path) => {
                self.folders.insert(path.clone());
            }
            Change::Rename(from, to, bytes) => {
                self.files.remove(from);
                self.files.insert(to.clone(), bytes.clone());
            }
            Change::Remove(path) => {
                self.files.remove(path);
            }
            Change::RemoveFolder(path) => {
                self.folders.remove(path);
            }
        }
    }
}

impl Change {
    /// Whether a sync of a folder makes it durable.
    fn is_in(&self, folder: &Path) -> bool {
        let path = match self {
            Change::Make(path, _)
            | Change::MakeFolder(path)
            | Change::Remove(path)
            | Change::RemoveFolder(path)
            | Change::Rename(_, path, _) => path,
        };
        path.parent() == Some(folder)
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
        }))
    }

    /// Calls so far that would change something.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Errors, losses of power and writes without room so far.
    pub fn faults(&self) -> u64 {
        self.lock().happened
    }

    /// Another fault, at a call that is still to come, counted from 0 at the disk's beginning.
    pub fn add_fault(&self, at: u64, fault: Fault) {
        self.lock().faults.insert(at, fault);
    }

    /// Takes back the faults that are still to come.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Whether the power is off.
    pub fn is_dead(&self) -> bool {
        self.lock().dead
    }

    /// A full disk has room again.
    pub fn make_room(&self) {
        self.lock().full = false;
    }

    /// The machine starts again with what was durable and some of what was not.
    pub fn restart(&self) {
        let inner = &mut *self.lock();
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
    }

    /// Flips one bit of one file, drawn by the seed, unless there is none; which file.
    pub fn rot(&self) -> Option<PathBuf> {
        let inner = &mut *self.lock();
        let candidates: Vec<PathBuf> = inner
            .now
            .files
            .iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .map(|(path, _)| path.clone())
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let path = candidates[inner.rng.random_range(0..candidates.len())].clone();
        let mut bytes = inner.now.files[&path].to_vec();
        let bit = inner.rng.random_range(0..bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let bytes = Arc::new(bytes);
        inner.now.files.insert(path.clone(), bytes.clone());
        inner.durable.files.insert(path.clone(), bytes);
        Some(path)
    }

    /// All files a process sees.
    pub fn files(&self) -> Vec<PathBuf> {
        self.lock().now.files.keys().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Counts a call that would change something, and lets the fault that is due happen; `torn` is
    /// what a loss of power may leave.
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

    fn file(&self, path: &Path) -> io::Result<Arc<Vec<u8>>> {
        match self.now.files.get(path) {
            Some(bytes) => Ok(bytes.clone()),
            None if self.now.folders.contains(path) => Err(io::ErrorKind::InvalidInput.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Files for SimulatedDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let inner = self.lock();
        inner.readable()?;
        inner.file(path).map(|bytes| bytes.to_vec())
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        let inner = self.lock();
        inner.readable()?;
        if inner.now.folders.contains(path) {
            return Ok(FileKind::Folder);
        }
        let len_bytes = inner.file(path)?.len() as u64;
        Ok(FileKind::File { len_bytes })
    }

    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let inner = &mut *self.lock();
        let len = inner.rng.random_range(0..=bytes.len());
        let part = Change::Make(path.to_owned(), Arc::new(bytes[..len].to_vec()));
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
        inner.change(Change::Make(path.to_owned(), Arc::new(bytes.to_vec())));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let inner = &mut *self.lock();
        let bytes = inner.file(from);
        let change = |bytes| Change::Rename(from.to_owned(), to.to_owned(), bytes);
        inner.enter(bytes.as_ref().ok().cloned().map(change))?;
        inner.require_parent(to)?;
        if inner.now.folders.contains(to) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        inner.change(change(bytes?));
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let inner = &mut *self.lock();
        let made = inner.file(from).map(|bytes| Change::Make(to.to_owned(), bytes));
        inner.enter(made.as_ref().ok().cloned())?;
        inner.require_parent(to)?;
        inner.change(made?);
        Ok(())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.lock();
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
        let inner = &mut *self.lock();
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
        let inner = self.lock();
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
        let inner = &mut *self.lock();
        let change = Change::Remove(path.to_owned());
        inner.enter(Some(change.clone()))?;
        inner.file(path)?;
        inner.change(change);
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let inner = &mut *self.lock();
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
