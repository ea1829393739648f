//! Sums over the leaves of gradients, for tensors that ranks have parts of.

use crate::{Batch, Buffer, LEAF_ELEMENTS, ListBuffer, MultiTensorReduction};

/// Leaves of gradients, 1,024 elements from the start of their tensor on, whose sums of squares are
/// wanted.
#[derive(Clone, Copy)]
pub struct LeafSquares<'a> {
    /// The kernel whose tree they belong to.
    pub kernel: &'a dyn MultiTensorReduction,
    /// What is read; records begin with a leaf.
    pub batches: &'a [Batch],
    /// First element of each tensor of the storage.
    pub offsets: &'a [u64],
    /// The gradients.
    pub list: &'a ListBuffer,
    /// The element of the storage that the list's memory begins with; see
    /// [`crate::Launch::firsts`].
    pub first: u64,
}

impl<'a> LeafSquares<'a> {
    /// Place of each leaf's first element in the list, and its element count, in order.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + 'a {
        let (offsets, list_first) = (self.offsets, self.first);
        let records = self.batches.iter().flat_map(|batch| &batch.records);
        records.flat_map(move |record| {
            let element = offsets[record.tensor as usize] + record.first_element;
            let first = element.wrapping_sub(list_first);
            let leaves = (0..record.numel).step_by(LEAF_ELEMENTS as usize);
            leaves.map(move |at| (first + at, LEAF_ELEMENTS.min(record.numel - at)))
        })
    }
}

/// Sums over leaves on a device, and the chunks that they are folded into.
pub struct FoldLeaves<'a> {
    /// A [`crate::SquareSum`] of every leaf.
    pub leaves: &'a dyn Buffer,
    /// For every chunk its leaves, as [`crate::TensorPartials`]: 64 at most.
    pub places: &'a dyn Buffer,
    /// Where the [`crate::SquareSum`] of every chunk goes.
    pub partials: &'a mut dyn Buffer,
}
