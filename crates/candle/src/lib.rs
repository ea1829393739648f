#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod adamw;
mod error;
mod gradients;
mod variables;

pub use adamw::{AdamW, Report};
pub use error::AdapterError;
pub use variables::IntoVariables;
