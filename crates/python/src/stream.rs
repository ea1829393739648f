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
    /// Whether what is enqueued on it is recorded as a graph.
    pub(crate) records: bool,
}

/// Wishes for a step on a device, as the library's Python side has them.
#[derive(Clone, Copy, Debug, Default, FromPyObject)]
pub(crate) struct Asked {
    /// Whether a step like this one may be recorded later.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "tables are a device's"))]
    pub(crate) keeps_tables: bool,
    /// Address of an f64: the factor that gradients are to be divided by.
    pub(crate) scale: Option<usize>,
    /// Address of a control block that says so, and whether the step is skipped.
    pub(crate) control: Option<usize>,
}

/// The place of a tensor of a step, by the position of its parameter and its role; `None` for one
/// that takes no part.
pub(crate) type LendPlace<'a> = &'a dyn Fn(u32, fusestep::tensor::Role) -> Option<Place>;
