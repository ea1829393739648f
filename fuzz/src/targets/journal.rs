//! Any bytes as the journal of two files that belong together, as they are and with their checksum
//! set right, so that changes get past it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fusestep_tensor_file::{Files, finish_interrupted_in};
use fusestep_testkit::SimulatedDisk;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::mark::content;
use crate::Outcome;

/// Where the first file lies, and its journal.
const FIRST: &str = "/d/p";
const JOURNAL: &str = "/d/.fusestep-p.journal";

/// Files that are new, files that are replaced and a stranger's: path and bytes.
const FILES: [(&str, &[u8]); 5] = [
    ("/d/p", b"old parameters"),
    ("/d/s", b"old state"),
    ("/d/.fusestep-1-2-3-4.ready", b"new parameters"),
    ("/d/.fusestep-1-2-3-5.ready", b"new state"),
    ("/e/x", b"a stranger's"),
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
}

/// The journal of the corpus: parameters and state take their places.
pub(crate) fn example() -> Journal {
    let moved = |from: usize, to: usize| Move {
        from: FILES[from].0.into(),
        to: FILES[to].0.into(),
        len_bytes: FILES[from].1.len() as u64,
        xxh3: sum(FILES[from].1),
    };
    let journal = Journal {
        format: "fusestep-journal".to_owned(),
        version: 1,
        moves: vec![moved(2, 0), moved(3, 1)],
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
    let mut said = finished(input)?;
    if let Ok(journal) = serde_json::from_slice::<Journal>(input) {
        let signed = serde_json::to_vec(&journal.signed()).map_err(|error| error.to_string())?;
        said.push('\n');
        said += &finished(&signed)?;
    }
    Ok(said)
}

/// What is refused has moved nothing, unless a move itself has failed; no bytes are made, and none
/// are gone but those that were replaced.
fn finished(journal: &[u8]) -> Outcome {
    let disk = SimulatedDisk::new(0, []);
    let folders = ["/d", "/e"].map(|folder| disk.create_folder(Path::new(folder)));
    let files = FILES.map(|(path, bytes)| disk.write_new(Path::new(path), bytes));
    let made: std::io::Result<()> = folders.into_iter().chain(files).collect();
    let made = made.and_then(|()| disk.write_new(Path::new(JOURNAL), journal));
    made.map_err(|error| error.to_string())?;
    let of_journal = |path: &Path| path == Path::new(JOURNAL);
    let others = || {
        let all = content(&disk).into_iter();
        all.filter(|(path, _)| !of_journal(path)).collect::<Vec<_>>()
    };
    let before = others();
    let outcome = finish_interrupted_in(&disk, Path::new(FIRST));
    let after = others();
    let bytes = |files: &[(PathBuf, Option<Vec<u8>>)]| -> BTreeSet<Option<Vec<u8>>> {
        files.iter().map(|(_, bytes)| bytes.clone()).collect()
    };
    if !bytes(&after).is_subset(&bytes(&before)) {
        return Err("bytes that were in no file".to_owned());
    }
    match outcome {
        Ok(true) => Ok("moved".to_owned()),
        Ok(false) if after == before => Ok("nothing to do".to_owned()),
        Ok(false) => Err("nothing was to be done, and files have moved".to_owned()),
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
