#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod compile;
mod error;
mod nccl;

pub use compile::{Options, Sanitize, build};
pub use error::EmulatorError;
pub use nccl::{Nccl, build_nccl};
