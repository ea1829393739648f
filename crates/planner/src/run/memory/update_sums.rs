//! Sums that updates leave over what they change.

use std::ops::Range;

use fusestep_launch::{Backend, Buffer, CHUNK_ELEMENTS, UnitSums, UpdateSums, tree_sum};

use crate::error::Result;
use crate::plan::leaves::chunks_of;
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// Places for the sums over what updates change in one storage.
pub(crate) struct UpdateRows {
    /// A [`UnitSums`] for each chunk.
    pub(crate) rows: Box<dyn Buffer>,
    /// Row of each tensor's first chunk, and one past the last tensor's.
    pub(crate) firsts: Vec<u64>,
}

impl UpdateRows {
    pub(crate) fn allocate(spec: &StorageSpec, backend: &dyn Backend) -> Result<Self> {
        let mut firsts = Vec::with_capacity(spec.members.len() + 1);
        let mut next = 0;
        firsts.push(next);
        for tensor in 0..spec.members.len() {
            let chunks = spec.layout.numel(tensor);
            next += chunks.div_ceil(u64::from(CHUNK_ELEMENTS));
            firsts.push(next);
        }
        Ok(Self {
            // A row is smaller than the chunk's elements, of which there is a list as long.
            rows: backend.allocate(next as usize * size_of::<UnitSums>())?,
            firsts,
        })
    }

    /// The rows, as a launch borrows them.
    pub(crate) fn lend(&mut self) -> UpdateSums<'_> {
        UpdateSums { rows: self.rows.as_mut(), firsts: &self.firsts }
    }
}

/// Memory to read the sums without allocating.
#[derive(Clone)]
pub(crate) struct UpdateReader {
    /// Sums of each chunk, parameter by parameter; 0 of chunks that took no part.
    pub(crate) chunks: Vec<f64>,
    /// Each parameter's first chunk, and one past the last's.
    pub(crate) firsts: Vec<usize>,
    /// A copy of rows that the host cannot read in place.
    pub(crate) copy: Vec<UnitSums>,
}

impl UpdateReader {
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        if !plan.update_norms {
            return None;
        }
        let chunks = plan.params.iter().map(|param| chunks_of(param.numel()));
        let firsts = std::iter::once(0).chain(chunks.scan(0, |next, chunks| {
            *next += chunks;
            Some(*next)
        }));
        let firsts: Vec<usize> = firsts.collect();
        Some(Self {
            chunks: vec![0.0; firsts.last().copied().unwrap_or(0)],
            firsts,
            copy: Vec::new(),
        })
    }

    /// The chunks of one parameter.
    pub(crate) fn place(&self, param: usize) -> Range<usize> {
        self.firsts[param]..self.firsts[param + 1]
    }

    pub(crate) fn params(&self) -> usize {
        self.firsts.len() - 1
    }

    pub(crate) fn sum(&self, param: usize) -> f64 {
        sum_of(&self.chunks[self.place(param)])
    }
}

/// The sum over chunks of a parameter, or over parameters.
pub(crate) fn sum_of(sums: &[f64]) -> f64 {
    tree_sum(sums.len(), |at| sums[at])
}
