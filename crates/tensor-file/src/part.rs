//! Parts: files that are being written, beside the places they are for. Dead processes may have
//! left some of them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use crate::Files;
use crate::system::{self, Process};

/// Beginning and end of the name of a part.
pub(crate) const PREFIX: &str = ".fusestep-";
pub(crate) const SUFFIX: &str = ".part";

/// End of the name of a complete part, which a journal in the same folder may name, or one
/// elsewhere. In the second case the name also says which journal.
pub(crate) const READY: &str = ".ready";
pub(crate) const READY_ELSEWHERE: &str = ".ready-elsewhere";

/// End of the name of a journal.
pub(crate) const JOURNAL: &str = ".journal";

/// Ends of the names of a file's lock, and of its pointer to a journal elsewhere.
pub(crate) const LOCK: &str = ".lock";
pub(crate) const POINTER: &str = ".pointer";

/// Most bytes of a journal: a few files with the longest paths that systems allow.
pub(crate) const MAX_JOURNAL_BYTES: u64 = 1 << 20;

/// Writes bytes, synced, under an unused name in `folder`; after an error no file is left.
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

/// A name that no other file of any process has.
pub(crate) fn free_name(folder: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let (pid, own) = (std::process::id(), identity());
    folder.join(format!("{PREFIX}{pid}-{own}-{number}{SUFFIX}"))
}

/// The path of a hidden file beside `target`: its name is a hash of `target`'s name, and `suffix`.
pub(crate) fn beside(target: &Path, suffix: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default();
    let word = format!("{PREFIX}{:016x}{suffix}", xxh3_64(name.as_encoded_bytes()));
    crate::place::folder(target).join(word)
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

/// End of the name of a complete part whose journal is this one, in another folder.
fn of_journal(journal: &Path) -> String {
    let sum = xxh3_64(journal.as_os_str().as_encoded_bytes());
    format!("-{sum:016x}{READY_ELSEWHERE}")
}

/// Removes from a folder the complete parts of dead processes that named this journal, which lies
/// elsewhere and is over.
pub(crate) fn remove_ready_of(files: &dyn Files, folder: &Path, journal: &Path) {
    let suffix = of_journal(journal);
    let of_dead = |name: &&String| {
        name.starts_with(PREFIX)
            && name.ends_with(&suffix)
            && files.lives(&folder.join(name)) == Some(false)
    };
    for name in files.list(folder).unwrap_or_default().iter().filter(of_dead) {
        let _ = files.remove_file(&folder.join(name));
    }
}

/// Whether a file is a complete part that a journal at `journal` may name.
pub(crate) fn is_ready(part: &Path, journal: &Path) -> bool {
    let name = part.file_name().unwrap_or_default().to_string_lossy();
    let suffix = suffix_of_ready(part, journal);
    name.starts_with(PREFIX) && name.ends_with(suffix)
}

fn suffix_of_ready(part: &Path, journal: &Path) -> &'static str {
    if part.parent() == journal.parent() { READY } else { READY_ELSEWHERE }
}

/// Writer of a part, by the part's name.
enum Writer {
    /// A process that this one could see if it lived, and the time at which it began.
    Here { pid: u32, began: String },
    /// A process that cannot be asked about.
    Elsewhere,
}

fn writer(name: &str) -> Writer {
    let mut fields = name.strip_prefix(PREFIX).unwrap_or_default().split('-');
    let pid = fields.next().and_then(|pid| pid.parse().ok());
    match (pid, fields.next(), fields.next()) {
        (Some(pid), Some(place), Some(began)) if place_of_processes() == Some(place) => {
            Writer::Here { pid, began: began.to_owned() }
        }
        _ => Writer::Elsewhere,
    }
}

/// Whether the process that has written a part of this name lives; `None` if the system does not
/// tell.
pub(crate) fn writer_lives(name: &str) -> Option<bool> {
    match writer(name) {
        Writer::Here { pid, began } => lives(system::process(pid), life(pid), &began),
        Writer::Elsewhere => None,
    }
}

/// The words of a part's name that all parts of one writer share.
pub(crate) fn writer_words(name: &str) -> &str {
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    let end = rest.match_indices('-').nth(2).map_or(rest.len(), |(at, _)| at);
    &rest[..end]
}

/// Whether the process that began at `began` lives; `None` if the system does not tell.
fn lives(process: Process, life: Life, began: &str) -> Option<bool> {
    match (process, life) {
        (Process::Gone, _) | (Process::There, Life::Ended) => Some(false),
        (Process::There, Life::Began(found)) => Some(found == began),
        // Another user's process may be hidden, and /proc may be missing.
        (Process::There, Life::Unknown) | (Process::Unknown, _) => None,
    }
}

/// The place in which this process's number is unique, and the time at which it began, because
/// numbers are used again.
fn identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let began = match life(std::process::id()) {
            Life::Began(began) => began,
            Life::Ended | Life::Unknown => "unknown".to_owned(),
        };
        format!("{}-{began}", place_of_processes().unwrap_or("unknown"))
    })
}

/// The start of this machine and the container within it, as one word. `None` if the system does
/// not tell; then no process can be asked about.
fn place_of_processes() -> Option<&'static str> {
    static PLACE: OnceLock<Option<String>> = OnceLock::new();
    let place = PLACE.get_or_init(|| {
        let start = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let container = std::fs::read_link("/proc/self/ns/pid").ok()?;
        let text = format!("{}{}", start.trim(), container.display());
        Some(text.chars().filter(char::is_ascii_alphanumeric).collect())
    });
    place.as_deref()
}

/// Life of a process, as far as the system tells.
enum Life {
    /// Start of the process, in ticks since the machine started.
    Began(String),
    /// The process has ended, but its parent has not collected its exit status, and may never do
    /// so.
    Ended,
    Unknown,
}

fn life(pid: u32) -> Life {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field, a name in parentheses, may hold anything.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let (Some(state), Some(threads), Some(began)) =
        (fields.first(), fields.get(17), fields.get(19))
    else {
        return Life::Unknown;
    };
    // The first thread of a process may end before the others do.
    let threads = threads.parse().unwrap_or(u64::MAX);
    if matches!(*state, "Z" | "X") && threads <= 1 {
        return Life::Ended;
    }
    Life::Began((*began).to_owned())
}

/// The start of a process that is there.
#[cfg(test)]
#[cfg(target_os = "linux")]
pub(crate) fn began(pid: u32) -> String {
    let Life::Began(began) = life(pid) else {
        panic!("process {pid} is not there");
    };
    began
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_of_a_process_is_not_its_death() {
        let began = |word: &str| Life::Began(word.to_owned());
        for (process, life, known) in [
            (Process::There, began("5"), Some(true)),
            (Process::There, began("6"), Some(false)),
            (Process::There, Life::Ended, Some(false)),
            // Hidden, as under hidepid, or no more files can be opened, or there is no /proc.
            (Process::There, Life::Unknown, None),
            (Process::Unknown, Life::Unknown, None),
            (Process::Gone, Life::Unknown, Some(false)),
        ] {
            assert_eq!(lives(process, life, "5"), known);
        }
        assert_eq!(system::process(std::process::id()), Process::There);
    }
}
