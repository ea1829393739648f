//! Processes that write to a disk in memory, told apart by the names of what they write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Whether the system can be asked about a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// A process of this machine.
    #[default]
    Here,
    /// A process of another machine.
    Elsewhere,
}

/// A process: how often the machine had been started before it, and its number since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    start: u64,
    number: u64,
    seen: Seen,
}

/// Processes and the hidden files that they have named.
#[derive(Debug, Default)]
pub(super) struct Processes {
    current: Process,
    ended: BTreeSet<Process>,
    /// The process that has chosen a name, by the name without its end.
    makers: BTreeMap<String, Process>,
}

impl Processes {
    pub(super) fn act_as(&mut self, number: u64, seen: Seen) {
        self.current = Process { start: self.current.start, number, seen };
    }

    pub(super) fn end(&mut self, number: u64) {
        let start = self.current.start;
        self.ended.extend([Seen::Here, Seen::Elsewhere].map(|seen| Process {
            start,
            number,
            seen,
        }));
    }

    pub(super) fn end_all(&mut self) {
        self.current.start += 1;
    }

    /// Notes that the current process gives a file this name.
    pub(super) fn note(&mut self, path: &Path) {
        if let Some(name) = chosen(path) {
            self.makers.entry(name).or_insert(self.current);
        }
    }

    /// Whether the process lives that has chosen a file's name, as far as the system tells.
    pub(super) fn lives(&self, path: &Path) -> Option<bool> {
        let maker = self.makers.get(&chosen(path)?)?;
        let lives = maker.start == self.current.start && !self.ended.contains(maker);
        (maker.seen == Seen::Here).then_some(lives)
    }
}

/// The words of a part's name that it keeps when it is complete.
fn chosen(path: &Path) -> Option<String> {
    let words: Vec<&str> = path.file_stem()?.to_str()?.split('-').take(5).collect();
    (words.len() == 5).then(|| words.join("-"))
}
