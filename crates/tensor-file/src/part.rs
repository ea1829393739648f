//! Files that are being written, beside the place they are for, and what dead processes have left
//! of them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::xxh3_64;

use crate::{Disk, FileKind, Files};

/// What the name of a file that is being written begins and ends with.
const PREFIX: &str = ".fusestep-";
const SUFFIX: &str = ".part";

/// What the name of a file ends with that a journal may name: one in the same folder, or one
/// elsewhere, before which the name says which journal.
const READY: &str = ".ready";
const READY_ELSEWHERE: &str = ".ready-elsewhere";

/// What the name of a journal ends with.
pub(crate) const JOURNAL: &str = ".journal";

/// Most bytes of a journal: of a few files with the longest paths that systems have.
pub(crate) const MAX_JOURNAL_BYTES: u64 = 1 << 20;

/// A file of a process that cannot be asked about, on another machine or in another container, is
/// left behind after so long.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Writes bytes, synced, under a name of their own in `folder`; nothing is left of it if that
/// fails.
pub(crate) fn write(files: &dyn Files, folder: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let part = free_name(folder);
    let written = files.write_new(&part, bytes);
    if let Err(error) = written {
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = files.remove_file(&part);
        }
        return Err(error);
    }
    Ok(part)
}

/// A name that no other file of this process or any other has.
pub(crate) fn free_name(folder: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let (pid, own) = (std::process::id(), identity());
    folder.join(format!("{PREFIX}{pid}-{own}-{number}{SUFFIX}"))
}

/// Whether a name is that of a file being written.
pub fn is_part(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// The name of a part once it is complete and about to be named by a journal.
pub(crate) fn ready(part: &Path, journal: &Path) -> PathBuf {
    let name = part.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(SUFFIX).unwrap_or(&name);
    let suffix = match suffix_of_ready(part, journal) {
        READY_ELSEWHERE => of_journal(journal),
        suffix => suffix.to_owned(),
    };
    part.with_file_name(format!("{stem}{suffix}"))
}

/// What the name of a complete file ends with whose journal is this one, in another folder.
fn of_journal(journal: &Path) -> String {
    let sum = xxh3_64(journal.as_os_str().as_encoded_bytes());
    format!("-{sum:016x}{READY_ELSEWHERE}")
}

/// Removes from a folder what dead processes were to move by a journal elsewhere that is over.
pub(crate) fn remove_ready_of(files: &dyn Files, folder: &Path, journal: &Path) {
    let suffix = of_journal(journal);
    let of_dead = |name: &&String| {
        name.starts_with(PREFIX) && name.ends_with(&suffix) && writer(name).is_dead(|| false)
    };
    for name in files.list(folder).unwrap_or_default().iter().filter(of_dead) {
        let _ = files.remove_file(&folder.join(name));
    }
}

/// Whether a file is a complete one that a journal at `journal` may name.
pub(crate) fn is_ready(part: &Path, journal: &Path) -> bool {
    let name = part.file_name().unwrap_or_default().to_string_lossy();
    let suffix = suffix_of_ready(part, journal);
    name.starts_with(PREFIX) && name.ends_with(suffix)
}

fn suffix_of_ready(part: &Path, journal: &Path) -> &'static str {
    if part.parent() == journal.parent() { READY } else { READY_ELSEWHERE }
}

/// What a journal says; `None` where there is none that is followed: a pipe or a device, which may
/// be waited for without end, or something longer than a journal is.
fn read_journal(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match Disk.kind(path) {
        Ok(FileKind::File { len_bytes }) if len_bytes <= MAX_JOURNAL_BYTES => {
            Disk.read(path).map(Some)
        }
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes what processes that are dead were writing in a folder, unless a journal has to finish
/// it; what cannot be removed costs space only.
pub fn remove_abandoned(folder: &Path) {
    let names = || std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_journal = |name: &str| name.starts_with(PREFIX) && name.ends_with(JOURNAL);
    let journals = names()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_journal))
        .map(|entry| read_journal(&entry.path()))
        .collect::<io::Result<Vec<_>>>();
    // One that cannot be read may name any of the files.
    let Ok(journals) = journals else {
        return;
    };
    for entry in names() {
        let name = entry.file_name();
        let named = |journal: &Vec<u8>| {
            let name = name.as_encoded_bytes();
            journal.windows(name.len().max(1)).any(|text| text == name)
        };
        if journals.iter().flatten().any(named) {
            continue;
        }
        let old = || {
            let written = entry.metadata().and_then(|found| found.modified());
            let age = written.map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
            age.is_ok_and(|age| age > ABANDONED_AFTER)
        };
        let abandoned = |name: &str| {
            let of_dead = || writer(name).is_dead(old);
            let here = name.ends_with(SUFFIX) || name.ends_with(READY);
            let elsewhere = name.ends_with(READY_ELSEWHERE);
            name.starts_with(PREFIX) && ((here && of_dead()) || (elsewhere && old()))
        };
        if name.to_str().is_some_and(abandoned) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Who writes a file, as its name tells.
enum Writer {
    /// A process that this one would see if it lived, and when it began.
    Here { pid: u32, began: String },
    /// One that cannot be asked about.
    Elsewhere,
}

fn writer(name: &str) -> Writer {
    let mut fields = name.strip_prefix(PREFIX).unwrap_or_default().split('-');
    let pid = fields.next().and_then(|pid| pid.parse().ok());
    match (pid, fields.next(), fields.next()) {
        (Some(pid), Some(place), Some(began)) if place == place_of_processes() => {
            Writer::Here { pid, began: began.to_owned() }
        }
        _ => Writer::Elsewhere,
    }
}

impl Writer {
    fn is_dead(&self, old: impl Fn() -> bool) -> bool {
        match self {
            Writer::Here { pid, began } => began_at(*pid).as_ref() != Some(began),
            Writer::Elsewhere => old(),
        }
    }
}

/// Where this process's number means something, and when it began: numbers are used again.
fn identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let began = began_at(std::process::id()).unwrap_or_default();
        format!("{}-{began}", place_of_processes())
    })
}

/// The start of this machine and the container within it, as one word; without them nobody's
/// process can be asked about.
fn place_of_processes() -> &'static str {
    static PLACE: OnceLock<String> = OnceLock::new();
    PLACE.get_or_init(|| {
        let start = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let container = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let text = format!("{}{}", start.trim(), container.display());
        let word: String = text.chars().filter(char::is_ascii_alphanumeric).collect();
        if word.is_empty() { "unknown".to_owned() } else { word }
    })
}

/// When a process began, in ticks since the machine did; `None` if there is none, or one that has
/// ended and whose parent has not asked how, and may never do.
fn began_at(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, a name in parentheses, may hold anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // Its first thread may end before the others do.
    let threads = fields.get(17)?.parse().unwrap_or(u64::MAX);
    let ended = matches!(fields.first(), Some(&("Z" | "X"))) && threads <= 1;
    let began = (*fields.get(19)?).to_owned();
    (!ended).then_some(began)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Prepared;

    #[test]
    #[cfg(target_os = "linux")]
    fn what_the_dead_have_left_goes_and_what_the_living_write_stays() {
        let folder = tempfile::tempdir().unwrap();
        let own = write(&Disk, folder.path(), b"own").unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let name = own.file_name().unwrap().to_str().unwrap();
        let (_, rest) = name[PREFIX.len()..].split_once('-').unwrap();
        let of_dead = folder.path().join(format!("{PREFIX}{}-{rest}", child.id()));
        let reused = rest.replace(&began_at(std::process::id()).unwrap(), "1");
        let reused = folder.path().join(format!("{PREFIX}{}-{reused}", std::process::id()));
        let elsewhere = folder.path().join(format!("{PREFIX}1-othermachine-5-0{SUFFIX}"));
        let foreign = folder.path().join("notes.part");
        for path in [&of_dead, &reused, &elsewhere, &foreign] {
            std::fs::write(path, b"x").unwrap();
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
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let began = began_at(child.id()).unwrap();
        let name = free_name(folder.path());
        let name = name.file_name().unwrap().to_str().unwrap();
        let own = format!("{PREFIX}{}-{}", std::process::id(), identity());
        let of_child = format!("{PREFIX}{}-{}-{began}", child.id(), place_of_processes());
        let left = folder.path().join(name.replace(&own, &of_child));
        std::fs::write(&left, b"x").unwrap();
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
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let left = |pid: u32, first: &Path| {
            let folder = std::fs::canonicalize(second.path()).unwrap();
            let name = ready(&free_name(&folder), &first.join(".fusestep-p.journal"));
            let name = name.file_name().unwrap().to_str().unwrap().to_owned();
            let (_, rest) = name[PREFIX.len()..].split_once('-').unwrap();
            let path = folder.join(format!("{PREFIX}{pid}-{rest}"));
            std::fs::write(&path, b"x").unwrap();
            path
        };
        let own = std::fs::canonicalize(first.path()).unwrap();
        let of_dead = left(child.id(), &own);
        let of_living = left(std::process::id(), &own);
        let of_another = left(child.id(), Path::new("/elsewhere"));
        commit(&places);
        assert!(!of_dead.exists(), "its journal is over");
        assert!(of_living.exists() && of_another.exists());
        assert_eq!(std::fs::read(&places[1]).unwrap(), b"new");
        assert!(is_ready(&of_dead, &own.join(".fusestep-p.journal")));
    }
}
