//! Segments and buckets: ranges of gradients that ranks reduce.

use std::ops::Range;

use fusestep_launch::Stride;
use serde::Serialize;

/// Segment of the gradient arena: consecutive whole tensors whose gradients share one allocation.
/// They become ready together for the calls of their buckets.
///
/// A segment is one bucket. But a tensor longer than the cap of buckets is a segment of its own,
/// cut into several buckets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Segment {
    /// Index of the storage.
    pub storage: usize,
    /// Elements of the storage, padding included.
    pub elements: Range<u64>,
    /// Tensors of the segment, as positions in the storage.
    pub tensors: Range<u32>,
    /// Buckets of the segment.
    pub buckets: Range<usize>,
}

/// A range of the gradient arena that one call reduces.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Index of the storage.
    pub storage: usize,
    /// Index of the segment that the bucket lies in.
    pub segment: usize,
    /// Elements of the storage, padding included.
    pub elements: Range<u64>,
    /// First element of the part of each rank of the shard group, then the end of the bucket.
    pub bounds: Vec<u64>,
}

impl Bucket {
    /// Element count, padding included.
    pub fn numel(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    /// The bucket's bytes in memory that begins with element `first` of the storage, for elements
    /// of `width` bytes.
    pub(crate) fn place(&self, first: u64, width: usize) -> Range<usize> {
        let at = |element: u64| (element - first) as usize * width;
        at(self.elements.start)..at(self.elements.end)
    }

    /// The bucket's bytes in a list of the whole storage.
    pub(crate) fn place_in(&self, stride: Stride) -> Range<usize> {
        stride.place(self.elements.start as usize..self.elements.end as usize)
    }

    /// The elements of the storage that a rank of the shard group updates, if updates are shared
    /// out.
    pub fn part(&self, rank: usize) -> Range<u64> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// Elements of each rank's part.
    pub fn counts(&self) -> Vec<usize> {
        let parts = self.bounds.windows(2);
        parts.map(|part| (part[1] - part[0]) as usize).collect()
    }

    /// Counts of these elements in each rank's part.
    pub fn overlaps(&self, elements: &Range<u64>) -> Vec<usize> {
        let parts = self.bounds.windows(2);
        let overlap = |part: &[u64]| {
            let (start, end) = (part[0].max(elements.start), part[1].min(elements.end));
            end.saturating_sub(start) as usize
        };
        parts.map(overlap).collect()
    }
}
