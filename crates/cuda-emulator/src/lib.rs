#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod compile;
mod entries;
mod error;

pub use compile::{Options, Sanitize, build};
pub use error::EmulatorError;
