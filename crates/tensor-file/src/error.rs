//! Errors of reading and writing files.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use fusestep_tensor::{Quoted, TensorError};

/// Error of reading or writing a file. A file that was there before is as it was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFileError {
    /// The operating system refused.
    #[error("{path}: cannot {operation}: {reason}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        operation: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// The path names no ordinary file.
    #[error("{path}: expected a file, found {found}", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// Thing that the path names.
        found: Cow<'static, str>,
    },
    /// The file ends too early or goes on too long.
    #[error("{path}: {what}: expected {expected} bytes, found {found}; the file is truncated or not in safetensors format", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The part of the file.
        what: &'static str,
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The header's length is out of range.
    #[error("{path}: header: expected at most {expected} bytes, found a length of {found}; the file is damaged or not in safetensors format", path = path.display())]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// Most bytes a header may have.
        expected: u64,
        /// The length it states.
        found: u64,
    },
    /// The header is no valid description of tensors.
    #[error("{path}: header: {reason}", path = path.display(), reason = Quoted(reason))]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault, in words.
        reason: String,
    },
    /// A tensor of the header is wrong.
    #[error(
        "{path}: `{name}`: {what}: expected {expected}, found {found}",
        path = path.display(),
        name = Quoted(name),
        expected = Quoted(expected),
        found = Quoted(found)
    )]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The property that is wrong.
        what: &'static str,
        /// The value that it must have.
        expected: String,
        /// The value that it has.
        found: String,
    },
    /// Two entries have one name.
    #[error("{path}: `{name}`: expected the name once, found it {found} times; rename one of the tensors", path = path.display(), name = Quoted(name))]
    DuplicateName {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
        /// Number of times that the name occurs in the header.
        found: usize,
    },
    /// A shape overflows.
    #[error("{path}: {source}", path = path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The fault of the shape.
        source: TensorError,
    },
    /// Files that belong together could neither all be put in place nor all be taken back.
    #[error("{reason}; {journal} has what is left: the next step on these files completes or undoes it", journal = journal.display())]
    Interrupted {
        /// The journal by which the next call completes the step or undoes it.
        journal: PathBuf,
        /// Reason why the step stopped.
        reason: String,
    },
    /// Another program is writing a file.
    #[error("{path}: expected a file that no other program is writing, found {lock} locked{told}; wait for that program, or give another file", path = path.display(), lock = lock.display())]
    Busy {
        /// The file.
        path: PathBuf,
        /// The lock that the other program holds.
        lock: PathBuf,
        /// Further text on the lock, appended to the message; may be empty.
        told: String,
    },
    /// Another program has written a file between reading and replacing.
    #[error("{path}: expected the file as it was at the beginning, found it changed by another program while this one ran; nothing was written, so begin again with the file as it is now", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A journal cannot be followed.
    #[error("{path}: {reason}", path = path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// The fault, and what helps.
        reason: String,
    },
    /// The library that writes the format refused.
    #[error("{path}: cannot write tensors: {reason}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The library's reason.
        reason: String,
    },
}

/// The error of an operation that the system refused.
pub(crate) fn io_error(
    path: &Path,
    operation: &'static str,
) -> impl FnOnce(std::io::Error) -> TensorFileError {
    move |error| TensorFileError::Io { path: path.to_owned(), operation, reason: error.to_string() }
}

/// Whether an error says that there can be no file at the path.
pub(crate) fn is_missing(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | InvalidFilename)
}
