#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod across;
mod alone;
mod bytes;
pub mod coded;
mod coded_normed_rule;
mod coded_rule;
mod compute;
mod converted;
mod element_kernel;
mod equation;
mod floats;
mod format;
pub mod mixed;
mod norm;
mod normed;
mod normed_equation;
mod normed_kernel;
mod normed_slices;
mod pairs;
mod param_storage;
mod parts;
mod power;
mod rounding;
mod run;
mod slices;
mod storage;
mod tally;
mod tree;

pub use alone::{grad_chunk_sum, param_chunk_sum};
pub use bytes::{padded_bytes, read_values, write_padded};
pub use compute::{Compute, FormatVisitor, Storage};
pub use element_kernel::{ElementRule, Entries, UpdateVisitor, element_kernel};
pub use equation::{ByEquation, Equation, FLAG_MAXIMIZE};
pub use format::run_format;
pub use norm::{
    LEAF_ELEMENTS, NORM_CHUNK_ELEMENTS, NORM_LANES, chunk_square_sum, fold, square_sum,
};
pub use normed::{Cached, Tensor, step_tensor};
pub use normed_equation::{
    Directed, NormedEntries, NormedEquation, NormedRule, Norms, ParamAndDirection,
    ParamAndGradient, Scalars, SummedChunk,
};
pub use normed_kernel::normed_kernel;
pub use power::{Pair, integer_power};
pub use run::{LANES, Update};
pub use slices::{OwnHyper, SliceTensor, StepError, step_normed_slices, step_slices};
pub use tree::{Terms, chunk_sums};

/// The crates that the macros here name.
#[doc(hidden)]
pub use {fusestep_launch as launch, fusestep_simd as simd, fusestep_tensor as tensor};
