//! Streams of a device, on which a library enqueues its work.

use pyo3::prelude::*;

use crate::tensor::Place;

/// A stream that a library works on.
#[derive(Clone, Copy, Debug, FromPyObject, PartialEq)]
pub(crate) struct Stream {
    /// The driver's handle.
    pub(crate) handle: usize,
    /// Whether the stream lives as long as the process.
    pub(crate) stays: bool,
}

/// The place of a tensor of a step, by the position of its parameter and its role; `None` for one
/// that takes no part.
pub(crate) type LendPlace<'a> = &'a dyn Fn(u32, fusestep::tensor::Role) -> Option<Place>;
