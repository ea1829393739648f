//! Journals of commits of several files, for the next claim. The journal of the moves lies beside
//! the first file, and a pointer to it beside each other file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fusestep_tensor::Quoted;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{io_error, is_missing};
use crate::{FileKind, Files, Look, TensorFileError, part, place};

/// First field of every journal.
const FORMAT: &str = "fusestep-journal";
/// Version of journals that is written; also the newest version that is read.
const VERSION: u32 = 2;
/// First field of every pointer.
const POINTER_FORMAT: &str = "fusestep-journal-pointer";

/// Advice for a journal that cannot be followed.
pub(crate) const HELP: &str = "look at the files it names and remove it";

/// Length and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) len_bytes: u64,
    /// xxh3 of all bytes, in hexadecimal.
    pub(crate) xxh3: String,
}

impl Sum {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { len_bytes: bytes.len() as u64, xxh3: in_hexadecimal(xxh3_64(bytes)) }
    }

    /// Whether the file at `path`, which looks like `look`, has this length and checksum.
    pub(crate) fn is_of(&self, files: &dyn Files, path: &Path, look: &Look) -> bool {
        look.kind == FileKind::File { len_bytes: self.len_bytes }
            && files.xxh3(path).is_ok_and(|found| in_hexadecimal(found) == self.xxh3)
    }
}

fn in_hexadecimal(xxh3: u64) -> String {
    format!("{xxh3:016x}")
}

/// The file that was at a place before a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Before {
    #[serde(flatten)]
    pub(crate) sum: Sum,
    /// Time of its last change, in nanoseconds since 1970.
    pub(crate) modified_ns: i64,
}

impl Before {
    /// The file at a place; `look` is how it looks.
    pub(crate) fn of(files: &dyn Files, path: &Path, look: &Look) -> std::io::Result<Self> {
        let len_bytes = match look.kind {
            FileKind::File { len_bytes } => len_bytes,
            _ => return Err(ErrorKind::InvalidInput.into()),
        };
        let sum = Sum { len_bytes, xxh3: in_hexadecimal(files.xxh3(path)?) };
        Ok(Self { sum, modified_ns: look.modified_ns })
    }
}

/// A move of one file to its place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Move {
    pub(crate) from: PathBuf,
    pub(crate) to: PathBuf,
    #[serde(flatten)]
    pub(crate) sum: Sum,
    /// The file that was at the place, if there was one; journals of version 1 do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) old: Option<Before>,
}

/// A journal: the moves of one commit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Journal {
    format: String,
    version: u32,
    pub(crate) moves: Vec<Move>,
    /// xxh3 of the moves as text, so that a journal that is not whole moves nothing.
    xxh3: String,
}

impl Journal {
    pub(crate) fn new(moves: Vec<Move>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, xxh3: sum_of(&moves), moves }
    }

    /// Whether the journal says which files were at the places before.
    pub(crate) fn says_old(&self) -> bool {
        self.version >= 2
    }

    /// Reads and checks the journal at `path`; the error says why it cannot be followed.
    fn parse(text: &[u8], path: &Path) -> Result<Self, String> {
        /// Fields that journals of every version have.
        #[derive(Deserialize)]
        struct Version {
            format: String,
            version: u64,
        }
        let version: Option<Version> = serde_json::from_slice(text).ok();
        let version = version.filter(|version| version.format == FORMAT);
        if let Some(Version { version, .. }) = version
            && version > u64::from(VERSION)
        {
            return Err(format!(
                "expected a journal of version {VERSION} at most, found version {version}, which a \
                 newer fusestep has written; finish it with that one"
            ));
        }
        let journal: Option<Self> = serde_json::from_slice(text).ok();
        let whole =
            |journal: &Self| journal.format == FORMAT && journal.xxh3 == sum_of(&journal.moves);
        let Some(mut journal) = journal.filter(whole) else {
            return Err(format!("expected moves and their checksum, found others; {HELP}"));
        };
        for step in &mut journal.moves {
            (step.from, step.to) = (plain(&step.from), plain(&step.to));
        }
        journal.check_moves(path)?;
        Ok(journal)
    }

    /// Refuses moves that a commit cannot have written. Anyone can put a journal into a shared
    /// folder, and it must not move other files.
    fn check_moves(&self, path: &Path) -> Result<(), String> {
        let first = self.moves.first().map(|step| step.to.as_path());
        if first.map(of).as_deref() != Some(path) {
            let found = first.map_or_else(|| "none".to_owned(), quoted);
            return Err(format!(
                "expected the file that it is called after as the first to be replaced, found \
                 {found}; {HELP}"
            ));
        }
        let ours = |step: &&Move| {
            step.to.file_name().is_some()
                && step.from.parent() == step.to.parent()
                && part::is_ready(&step.from, path)
        };
        match self.moves.iter().find(|step| !ours(step)) {
            None => Ok(()),
            Some(step) => Err(format!(
                "expected moves of complete parts (`.fusestep-….ready`) to files beside them, \
                 found one from {} to {}; {HELP}",
                quoted(&step.from),
                quoted(&step.to)
            )),
        }
    }
}

/// Content of a pointer: the path of the journal, for a file that is not the commit's first.
#[derive(Debug, Serialize, Deserialize)]
struct Pointer {
    format: String,
    journal: PathBuf,
}

/// A name from a journal as messages quote it.
pub(crate) fn quoted(path: &Path) -> String {
    Quoted(&path.to_string_lossy()).to_string()
}

fn sum_of(moves: &[Move]) -> String {
    let text = serde_json::to_vec(moves).unwrap_or_default();
    Sum::of(&text).xxh3
}

/// The path of the journal of a commit whose first file is `target`.
pub(crate) fn of(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    place::folder(target).join(format!(".fusestep-{name}{}", part::JOURNAL))
}

/// The path of a file's pointer, which is short even if the file's name is long.
pub(crate) fn pointer_of(target: &Path) -> PathBuf {
    part::beside(target, part::POINTER)
}

/// The bytes of a pointer to a journal.
pub(crate) fn pointer_to(journal: &Path) -> serde_json::Result<Vec<u8>> {
    let pointer = Pointer { format: POINTER_FORMAT.to_owned(), journal: journal.to_owned() };
    serde_json::to_vec(&pointer)
}

/// The path of the journal to which the bytes of a pointer lead.
pub(crate) fn in_pointer(text: &[u8]) -> Option<PathBuf> {
    let found: Option<Pointer> = serde_json::from_slice(text).ok();
    found.filter(|found| found.format == POINTER_FORMAT).map(|found| plain(&found.journal))
}

/// Path of the same file without `//` and `/./`. Anyone could write any number of them into a
/// journal, and a message would repeat them all.
fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

/// The journal to be followed for a file, and its path.
///
/// # Errors
/// [`TensorFileError::Journal`] for a journal that cannot be followed.
pub(crate) fn find(
    files: &dyn Files,
    target: &Path,
) -> Result<Option<(PathBuf, Journal)>, TensorFileError> {
    let names = |journal: &Journal| journal.moves.iter().any(|step| step.to == target);
    let own = of(target);
    if let Some(journal) = read(files, &own)? {
        return Ok(Some((own, journal)));
    }
    let pointer = pointer_of(target);
    let Some(text) = read_text(files, &pointer)? else {
        return Ok(None);
    };
    let Some(journal) = in_pointer(&text) else {
        let reason = "expected the path of a journal, found something else; remove it".to_owned();
        return Err(TensorFileError::Journal { path: pointer, reason });
    };
    // A pointer stays behind if the commit ended before its journal counted.
    let followed = read(files, &journal)?.filter(names);
    Ok(followed.map(|found| (journal, found)))
}

fn read(files: &dyn Files, path: &Path) -> Result<Option<Journal>, TensorFileError> {
    let refuse = |reason| TensorFileError::Journal { path: path.to_owned(), reason };
    let text = read_text(files, path)?;
    text.map(|text| Journal::parse(&text, path).map_err(refuse)).transpose()
}

/// The bytes of a hidden file that this user or the superuser owns; `None` without such a file.
fn read_text(files: &dyn Files, path: &Path) -> Result<Option<Vec<u8>>, TensorFileError> {
    let refuse = |reason: String| Err(TensorFileError::Journal { path: path.to_owned(), reason });
    let look = match files.look(path) {
        Ok(look) => look,
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(io_error(path, "read")(error)),
    };
    let most = part::MAX_JOURNAL_BYTES;
    match look.kind {
        FileKind::File { len_bytes } if len_bytes > most => {
            refuse(format!("expected a journal of at most {most} bytes, found {len_bytes}; {HELP}"))
        }
        // Anyone who may write into a folder can put a journal there. Such a journal must not
        // replace files of another user.
        FileKind::File { .. } if !look.is_trusted => refuse(format!(
            "expected a journal of this user or the superuser, found another user's; that user's \
             next step finishes it, or {HELP}"
        )),
        FileKind::File { .. } => match files.read(path) {
            Err(error) if is_missing(&error) => Ok(None),
            text => Ok(Some(text.map_err(io_error(path, "read"))?)),
        },
        FileKind::Folder | FileKind::Other => refuse(
            "expected the journal of an interrupted step, or nothing, found a folder, link, pipe, \
             socket or device; move it"
                .to_owned(),
        ),
    }
}
