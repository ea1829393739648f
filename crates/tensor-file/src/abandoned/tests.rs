use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::SystemTime;

use super::*;
use crate::journal::{Before, Journal, Move, Sum};
use crate::{Claim, Finished, Lock, Look, Prepared, check_writable_together};

/// The number of a process that has ended.
fn dead_pid() -> u32 {
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    child.id()
}

/// An unused name in a folder as another process of this machine would choose it.
fn name_by(pid: u32, folder: &Path) -> PathBuf {
    let own = part::free_name(folder);
    let name = own.file_name().unwrap().to_str().unwrap();
    let (_, rest) = name[PREFIX.len()..].split_once('-').unwrap();
    folder.join(format!("{PREFIX}{pid}-{rest}"))
}

fn set_old(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - 2 * ABANDONED_AFTER).unwrap();
}

#[test]
fn what_processes_write_of_which_the_system_tells_nothing_stays_for_a_day() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("{PREFIX}1-unknown-unknown-0{READY}"));
    fs::write(&path, b"x").unwrap();
    remove_abandoned(folder.path());
    assert!(path.exists());
    set_old(&path);
    remove_abandoned(folder.path());
    assert!(!path.exists());
}

#[test]
#[cfg(target_os = "linux")]
fn what_the_dead_have_left_goes_and_what_the_living_write_stays() {
    let folder = tempfile::tempdir().unwrap();
    let own = part::write(&Disk, folder.path(), b"own").unwrap();
    let of_dead = name_by(dead_pid(), folder.path());
    let name = own.file_name().unwrap().to_str().unwrap();
    let (_, rest) = name[PREFIX.len()..].split_once('-').unwrap();
    let reused = rest.replace(&part::began(std::process::id()), "1");
    let reused = folder.path().join(format!("{PREFIX}{}-{reused}", std::process::id()));
    let elsewhere = folder.path().join(format!("{PREFIX}1-othermachine-5-0{SUFFIX}"));
    let foreign = folder.path().join("notes.part");
    for path in [&of_dead, &reused, &elsewhere, &foreign] {
        fs::write(path, b"x").unwrap();
    }
    remove_abandoned(folder.path());
    assert!(own.exists() && elsewhere.exists() && foreign.exists());
    assert!(!of_dead.exists(), "its process has ended");
    assert!(!reused.exists(), "its process's number is another's now");
}

#[test]
#[cfg(target_os = "linux")]
fn what_the_dead_have_left_goes_though_nobody_has_asked_how_they_ended() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let began = part::began(child.id());
    let name = name_by(child.id(), folder.path());
    let name = name.file_name().unwrap().to_str().unwrap();
    let left = folder.path().join(name.replace(&part::began(std::process::id()), &began));
    fs::write(&left, b"x").unwrap();
    remove_abandoned(folder.path());
    assert!(left.exists(), "its process is alive");
    child.kill().unwrap();
    let begun = std::time::Instant::now();
    while left.exists() && begun.elapsed() < Duration::from_secs(10) {
        remove_abandoned(folder.path());
        std::thread::sleep(Duration::from_millis(5));
    }
    let is_left = left.exists();
    child.wait().unwrap();
    assert!(!is_left, "its process has ended");
}

#[test]
#[cfg(target_os = "linux")]
fn what_the_dead_had_ready_elsewhere_goes_with_the_next_commit_of_their_journal() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let places = [first.path().join("p"), second.path().join("s")];
    let commit = |places: &[PathBuf]| {
        let prepared = places.iter().map(|place| Prepared::bytes(place, b"new").unwrap());
        crate::commit_together(prepared.collect()).unwrap();
    };
    let left = |pid: u32, first: &Path| {
        let folder = fs::canonicalize(second.path()).unwrap();
        let path = part::ready(&name_by(pid, &folder), &first.join(".fusestep-p.journal"));
        fs::write(&path, b"x").unwrap();
        path
    };
    let own = fs::canonicalize(first.path()).unwrap();
    let of_dead = left(dead_pid(), &own);
    let of_living = left(std::process::id(), &own);
    let of_another = left(dead_pid(), Path::new("/elsewhere"));
    commit(&places);
    assert!(!of_dead.exists(), "its journal is over");
    assert!(of_living.exists() && of_another.exists());
    assert_eq!(fs::read(&places[1]).unwrap(), b"new");
    assert!(part::is_ready(&of_dead, &own.join(".fusestep-p.journal")));
}

/// Two folders in which a writer of `new` was killed, and its places.
#[derive(Debug)]
struct Killed {
    _folders: [tempfile::TempDir; 2],
    places: [PathBuf; 2],
    journal: PathBuf,
    /// Both files, complete.
    ready: [PathBuf; 2],
    /// The second name of the old first file.
    old: PathBuf,
}

impl Killed {
    /// The state just before the journal, with which [`Killed::commit`] makes the step count.
    fn before_its_journal() -> Self {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let at = [0, 1].map(|at: usize| fs::canonicalize(folders[at].path()).unwrap());
        let places = [at[0].join("p"), at[1].join("s")];
        let (pid, journal) = (dead_pid(), journal::of(&places[0]));
        let ready = [0, 1].map(|number| part::ready(&name_by(pid, &at[number]), &journal));
        for (place, ready) in places.iter().zip(&ready) {
            fs::write(place, "old").unwrap();
            fs::write(ready, "new").unwrap();
        }
        set_old(&ready[1]);
        let old = name_by(pid, &at[0]);
        fs::hard_link(&places[0], &old).unwrap();
        let pointer = journal::pointer_to(&journal).unwrap();
        fs::write(journal::pointer_of(&places[1]), pointer).unwrap();
        Self { _folders: folders, places, journal, ready, old }
    }

    /// Puts the journal in its place, and the first file.
    fn commit(&self) {
        let moves = self.places.iter().zip(&self.ready).map(|(to, from)| {
            let look = Disk.look(to).unwrap();
            let old = Some(Before::of(&Disk, to, &look).unwrap());
            Move { from: from.clone(), to: to.clone(), sum: Sum::of(b"new"), old }
        });
        let journal = Journal::new(moves.collect());
        fs::write(&self.journal, serde_json::to_vec(&journal).unwrap()).unwrap();
        fs::rename(&self.ready[0], &self.places[0]).unwrap();
    }

    /// Requires that the next step on the files puts both in place.
    fn require_finished(&self) {
        let places = self.places.each_ref().map(PathBuf::as_path);
        check_writable_together(&places).unwrap();
        let claim = Claim::of(&places).unwrap();
        let place = self.places[0].clone();
        assert_eq!(claim.finished(), [Finished::Completed { place }]);
        assert_eq!(places.map(|place| fs::read_to_string(place).unwrap()), ["new", "new"]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_step_that_was_interrupted_days_ago_is_finished() {
    let killed = Killed::before_its_journal();
    killed.commit();
    killed.require_finished();
}

#[test]
#[cfg(target_os = "linux")]
fn a_step_beside_one_that_was_interrupted_days_ago_leaves_its_files_alone() {
    let killed = Killed::before_its_journal();
    killed.commit();
    let folders = killed.places.each_ref().map(|place| place::folder(place));
    for folder in &folders {
        drop(Prepared::bytes(&folder.join("another"), b"another").unwrap());
    }
    assert_eq!(fs::read_to_string(&killed.old).unwrap(), "old", "its journal is open");
    killed.require_finished();
    folders.iter().for_each(|folder| remove_abandoned(folder));
    for folder in &folders {
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "its journal is over");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_ready_file_whose_journal_never_came_goes_after_a_day() {
    let killed = Killed::before_its_journal();
    remove_abandoned(&place::folder(&killed.ready[1]));
    assert!(!killed.ready[1].exists());
    // A folder that is out of reach may have its journal.
    let killed = Killed::before_its_journal();
    let away = killed.places[0].parent().unwrap().with_extension("away");
    fs::rename(killed.places[0].parent().unwrap(), &away).unwrap();
    remove_abandoned(&place::folder(&killed.ready[1]));
    fs::rename(&away, killed.places[0].parent().unwrap()).unwrap();
    assert!(killed.ready[1].exists());
}

/// A disk on which a step counts, and its writer dies, as soon as anybody asks whether it lives.
#[derive(Debug)]
struct DiesWhenAsked<'k>(&'k Killed);

impl Files for DiesWhenAsked<'_> {
    fn lives(&self, part: &Path) -> Option<bool> {
        if !self.0.journal.exists() {
            self.0.commit();
        }
        Disk.lives(part)
    }
    fn age(&self, path: &Path) -> io::Result<Duration> {
        Disk.age(path)
    }
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        Disk.read(path)
    }
    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        Disk.kind(path)
    }
    fn look(&self, path: &Path) -> io::Result<Look> {
        Disk.look(path)
    }
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        Disk.lock(path)
    }
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        Disk.write_new(path, bytes)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.link(from, to)
    }
    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        Disk.sync_folder(path)
    }
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        Disk.create_folder(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        Disk.list(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        Disk.remove_file(path)
    }
    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        Disk.remove_folder(path)
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_writer_that_commits_and_dies_during_the_removal_keeps_its_files() {
    for at in 0..2 {
        let killed = Killed::before_its_journal();
        remove_abandoned_in(&DiesWhenAsked(&killed), &place::folder(&killed.places[at]));
        assert!(killed.journal.exists() && killed.ready[1].exists());
        killed.require_finished();
    }
}
