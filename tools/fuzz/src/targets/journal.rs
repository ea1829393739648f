//! Any bytes as the journal of two files that belong together, in one folder or in two, as they are
//! and with their checksum set right, so that changes get past it; and as what leads to a journal.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fusestep_tensor_file::{Files, Finished, finish_interrupted_in};
use fusestep_testkit::SimulatedDisk;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::mark::content;
use crate::Outcome;

/// Where the first file lies, and its journal.
const FIRST: &str = "/d/p";
const JOURNAL: &str = "/d/.fusestep-p.journal";

/// Where the second file lies in a folder of its own.
const SECOND: &str = "/f/s";

/// Files that are new, files that are replaced and a stranger's: path and bytes.
const FILES: [(&str, &[u8]); 7] = [
    ("/d/p", b"old parameters"),
    ("/d/s", b"old state"),
    ("/d/.fusestep-1-2-3-4.ready", b"new parameters"),
    ("/d/.fusestep-1-2-3-5.ready", b"new state"),
    ("/e/x", b"a stranger's"),
    ("/f/s", b"old state elsewhere"),
    ("/f/.fusestep-1-2-3-6-0.ready-elsewhere", b"new state elsewhere"),
];

/// What a journal says, in the order in which its checksum is taken.
#[derive(Serialize, Deserialize)]
pub(crate) struct Journal {
    format: String,
    version: u32,
    moves: Vec<Move>,
    xxh3: String,
}

#[derive(Serialize, Deserialize)]
struct Move {
    from: PathBuf,
    to: PathBuf,
    len_bytes: u64,
    xxh3: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    old: Option<Before>,
}

/// What was at a place before.
#[derive(Serialize, Deserialize)]
struct Before {
    len_bytes: u64,
    xxh3: String,
    modified_ns: i64,
}

/// Journals of the corpus: parameters and state take their places in one folder and in two.
pub(crate) fn examples() -> [Journal; 2] {
    [[(2, 0), (3, 1)], [(2, 0), (6, 5)]].map(example)
}

/// Where a file lies that leads from the second file to the journal.
fn pointer_path() -> PathBuf {
    format!("/f/.fusestep-{}.pointer", sum(b"s")).into()
}

/// What leads from a second file to a journal.
pub(crate) fn pointer() -> String {
    format!(r#"{{"format":"fusestep-journal-pointer","journal":"{JOURNAL}"}}"#)
}

/// The journal of moves from one of the files to another.
fn example(moves: [(usize, usize); 2]) -> Journal {
    let moved = |from: usize, to: usize| Move {
        from: FILES[from].0.into(),
        to: FILES[to].0.into(),
        len_bytes: FILES[from].1.len() as u64,
        xxh3: sum(FILES[from].1),
        old: Some(Before {
            len_bytes: FILES[to].1.len() as u64,
            xxh3: sum(FILES[to].1),
            // The disk counts what is written.
            modified_ns: 2 * to as i64 + 2,
        }),
    };
    let journal = Journal {
        format: "fusestep-journal".to_owned(),
        version: 2,
        moves: moves.map(|(from, to)| moved(from, to)).into(),
        xxh3: String::new(),
    };
    journal.signed()
}

impl Journal {
    fn signed(mut self) -> Self {
        self.xxh3 = sum(&serde_json::to_vec(&self.moves).unwrap_or_default());
        self
    }
}

pub(crate) fn run(input: &[u8]) -> Outcome {
    let mut said = finished_from_both(input)?;
    if let Ok(journal) = serde_json::from_slice::<Journal>(input) {
        let signed = serde_json::to_vec(&journal.signed()).map_err(|error| error.to_string())?;
        said.push('\n');
        said += &finished_from_both(&signed)?;
    }
    let [_, journal] = examples();
    let journal = serde_json::to_vec(&journal).map_err(|error| error.to_string())?;
    said.push('\n');
    said += &finished(SECOND, &journal, input)?;
    Ok(said)
}

fn finished_from_both(journal: &[u8]) -> Outcome {
    let first = finished(FIRST, journal, pointer().as_bytes())?;
    Ok(first + "\n" + &finished(SECOND, journal, pointer().as_bytes())?)
}

/// What is refused has moved nothing, unless a move itself has failed; no bytes are made, and none
/// are gone but those that were replaced.
fn finished(target: &str, journal: &[u8], pointer: &[u8]) -> Outcome {
    let disk = SimulatedDisk::new(0, []);
    let folders = ["/d", "/e", "/f"].map(|folder| disk.create_folder(Path::new(folder)));
    let files = FILES.map(|(path, bytes)| disk.write_new(Path::new(path), bytes));
    let made: std::io::Result<()> = folders.into_iter().chain(files).collect();
    let made = made.and_then(|()| disk.write_new(Path::new(JOURNAL), journal));
    let made = made.and_then(|()| disk.write_new(&pointer_path(), pointer));
    made.map_err(|error| error.to_string())?;
    let of_journal = |path: &Path| path == Path::new(JOURNAL) || path == pointer_path();
    let others = || {
        let all = content(&disk).into_iter();
        all.filter(|(path, _)| !of_journal(path)).collect::<Vec<_>>()
    };
    let before = others();
    let outcome = finish_interrupted_in(&disk, Path::new(target));
    let after = others();
    let places = |files: &[(PathBuf, Option<Vec<u8>>)]| -> Vec<(PathBuf, Option<Vec<u8>>)> {
        let is_place = |(path, _): &&(PathBuf, _)| !path.to_string_lossy().contains("/.fusestep-");
        files.iter().filter(is_place).cloned().collect()
    };
    let bytes = |files: &[(PathBuf, Option<Vec<u8>>)]| -> BTreeSet<Option<Vec<u8>>> {
        files.iter().map(|(_, bytes)| bytes.clone()).collect()
    };
    if !bytes(&after).is_subset(&bytes(&before)) {
        return Err("bytes that were in no file".to_owned());
    }
    match outcome {
        Ok(Some(Finished::Dropped { .. }) | None) if places(&after) != places(&before) => {
            Err("nothing was to be done, and files have moved".to_owned())
        }
        Ok(Some(finished)) => Ok(finished.to_string()),
        Ok(None) => Ok("nothing to do".to_owned()),
        Err(error) => {
            let text = error.to_string();
            let is_move = text.contains("cannot replace");
            if after == before || is_move {
                return Ok(text);
            }
            Err(format!("refused, and moved all the same: {text}"))
        }
    }
}

fn sum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}
