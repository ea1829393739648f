//! Safetensors files: every defect named on reading, all or nothing on writing.
//!
//! The `safetensors` library decides what is valid. When it refuses a file, [`TensorFile`] goes through the header once more and
//! says which tensor is wrong, what was expected and what was found. [`write_atomically`] leaves an existing file as it was until
//! the new one is complete on disk.
#![forbid(unsafe_code)]

mod diagnose;
mod error;
mod header;
mod read;
mod write;

pub use error::TensorFileError;
pub use read::{TensorEntry, TensorFile};
pub use write::{Prepared, TensorBytes, check_writable, write_atomically};
