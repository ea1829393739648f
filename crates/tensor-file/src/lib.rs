#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod commit;
mod diagnose;
mod error;
mod files;
mod header;
mod part;
mod place;
mod read;
mod serialize;
mod write;

pub use commit::{commit_together, finish_interrupted, finish_interrupted_in};
pub use error::TensorFileError;
pub use files::{Disk, FileKind, Files};
pub use part::{is_part, remove_abandoned};
pub use place::same_file;
pub use read::{TensorEntry, TensorFile};
pub use serialize::serialize;
pub use write::{Prepared, TensorBytes, check_writable, check_writable_together, write_atomically};
