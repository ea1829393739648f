//! Sums over the chunks of parameters, and the state of the memory that they are of.

use std::sync::atomic::{AtomicBool, AtomicU64};

use fusestep_elementwise::Cached;
use fusestep_launch::CHUNK_ELEMENTS;

/// Sums over the chunks of all parameters of a storage, as their last update left them.
///
/// # Cost
/// 8 bytes for each 65,536 elements, allocated at the first step.
#[derive(Debug)]
pub(crate) struct ParamSums {
    /// Place of each tensor's first sum, and one past the last tensor's.
    pub(crate) starts: Vec<usize>,
    chunks: Vec<AtomicU64>,
    /// Whether the sums of a tensor are valid, for each tensor.
    pub(crate) valid: Vec<AtomicBool>,
    /// State of the memory over which the sums were taken.
    pub(crate) of: Option<Written>,
}

/// Counts of how often the memory of the parameters, and of their masters or remainders, was
/// borrowed for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) param: u64,
    pub(crate) beside: Option<u64>,
}

impl ParamSums {
    /// The sums of one tensor of `numel` elements.
    pub(crate) fn of(&self, tensor: usize, numel: u64) -> Option<Cached<'_>> {
        let range = *self.starts.get(tensor)?..*self.starts.get(tensor + 1)?;
        let chunks = numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize;
        Some(Cached {
            chunks: self.chunks.get(range)?.get(..chunks)?,
            valid: self.valid.get(tensor)?,
        })
    }

    /// Sums that are all not valid yet.
    pub(crate) fn new(starts: Vec<usize>) -> Self {
        let chunks = starts.last().copied().unwrap_or(0);
        Self {
            chunks: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            valid: (1..starts.len()).map(|_| AtomicBool::new(false)).collect(),
            starts,
            of: None,
        }
    }
}
