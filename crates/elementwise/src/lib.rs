#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod across;
mod alone;
mod bytes;
mod compute;
mod converted;
mod element_kernel;
mod format;
mod norm;
mod normed;
mod pairs;
mod param_storage;
mod power;
mod rounding;
mod run;
mod slices;
mod storage;
mod tally;
mod tree;

pub use alone::{grad_chunk_sum, param_chunk_sum};
pub use bytes::{padded_bytes, read_values, write_padded};
pub use compute::Compute;
pub use element_kernel::{ElementRule, Entries, element_kernel};
pub use format::{FormatVisitor, run_format};
pub use norm::{
    LEAF_ELEMENTS, NORM_CHUNK_ELEMENTS, NORM_LANES, chunk_square_sum, fold, square_sum,
};
pub use normed::{Cached, Tensor, step_tensor};
pub use power::integer_power;
pub use run::{LANES, Update};
pub use slices::{OwnHyper, SliceTensor, StepError, step_normed_slices, step_slices};
pub use storage::Storage;
pub use tree::{Terms, chunk_sums};
