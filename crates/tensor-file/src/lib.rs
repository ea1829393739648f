#![doc = include_str!("../README.md")]
#![cfg_attr(not(unix), forbid(unsafe_code))]
#![cfg_attr(unix, deny(unsafe_code))]

mod abandoned;
mod claim;
mod commit;
mod diagnose;
mod disk;
mod error;
mod files;
mod finish;
mod header;
mod journal;
mod lock;
mod part;
mod place;
#[cfg(unix)]
#[expect(unsafe_code, reason = "calls of POSIX that the standard library lacks")]
mod posix;
mod prepared;
mod read;
mod serialize;
mod system;
mod tensor_bytes;
mod versions;
mod write;

pub use abandoned::{remove_abandoned, remove_abandoned_in};
pub use claim::{Claim, finish_interrupted, finish_interrupted_in};
pub use commit::commit_together;
pub use disk::Disk;
pub use error::TensorFileError;
pub use files::{FileKind, Files, Lock, Look};
pub use finish::Finished;
pub use header::object_entries;
pub use part::is_part;
pub use place::same_file;
pub use prepared::Prepared;
pub use read::{TensorEntry, TensorFile};
pub use serialize::serialize;
pub use tensor_bytes::TensorBytes;
pub use versions::Versions;
pub use write::{check_writable, check_writable_together, write_atomically};
