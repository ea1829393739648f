#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod counted;
mod desc;
mod dtype;
mod quoted;
mod role;
mod shape;

pub use counted::{counted, counted_are, grouped, short_number};
pub use desc::{ParamDesc, TensorError, Trust, check_total_numel, check_unique_names};
pub use dtype::{DType, Element};
pub use quoted::{MAX_QUOTED_CHARS, Quoted, escaped, escaped_json};
pub use role::Role;
pub use shape::{MAX_MODEL_NUMEL, MAX_NUMEL, Shape};
