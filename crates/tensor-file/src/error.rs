//! Why a file could not be read or written.

use std::path::PathBuf;

use fusestep_tensor::{Quoted, TensorError};

/// Why a file could not be read or written. A file that was there before is as it was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFileError {
    /// The operating system refused.
    #[error("{path}: cannot {operation}: {reason}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        operation: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// The path names no ordinary file.
    #[error("{path}: expected a file, found {found}", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The file ends too early or goes on too long.
    #[error("{path}: {what}: expected {expected} bytes, found {found}; the file is truncated or not in safetensors format", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Which part.
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
        /// What is wrong.
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
        /// Which of its properties.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Two entries have one name.
    #[error("{path}: `{name}`: expected the name once, found it {found} times; rename one of the tensors", path = path.display(), name = Quoted(name))]
    DuplicateName {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
        /// How often it stands in the header.
        found: usize,
    },
    /// A shape overflows.
    #[error("{path}: {source}", path = path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TensorError,
    },
    /// Files that belong together could neither all be put in place nor all be taken back.
    #[error("{reason}; {journal} has what is left: the next step on these files completes it", journal = journal.display())]
    Interrupted {
        /// What the next call goes by.
        journal: PathBuf,
        /// Why it stopped.
        reason: String,
    },
    /// A journal cannot be followed.
    #[error("{path}: {reason}", path = path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// What is wrong, and what helps.
        reason: String,
    },
    /// The library that writes the format refused.
    #[error("{path}: cannot write tensors: {reason}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Its reason.
        reason: String,
    },
}
