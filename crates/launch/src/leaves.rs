//! Sums over the leaves of gradients, for tensors that ranks have parts of.

use crate::{
    Batch, Buffer, CHUNK_UNITS, LEAF_ELEMENTS, ListBuffer, MAX_SUMS, MultiTensorReduction,
    ROW_VALUES,
};

/// Leaves of gradients whose sums of squares are wanted. A leaf is 1,024 elements, counted from the
/// start of its tensor.
#[derive(Clone, Copy)]
pub struct LeafSquares<'a> {
    /// The kernel whose tree the leaves belong to.
    pub kernel: &'a dyn MultiTensorReduction,
    /// The batches to read; every record begins with a leaf.
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
    /// A [`crate::SquareSum`] of every leaf, or rows of a kernel's sums
    /// ([`crate::DeviceSums::leaf_sums_into`]).
    pub leaves: &'a dyn Buffer,
    /// For every leaf the place of its sums in rows, as [`leaf_place`] gives it; `None` if leaves
    /// have a [`crate::SquareSum`] each.
    pub index: Option<&'a dyn Buffer>,
    /// For every chunk its leaves, as [`crate::TensorPartials`]: 64 at most.
    pub places: &'a dyn Buffer,
    /// Memory for the [`crate::SquareSum`] of every chunk, or for its [`MAX_SUMS`] sums.
    pub partials: &'a mut dyn Buffer,
}

/// The place of a leaf among all rows, counted in groups of [`MAX_SUMS`] values; `None` beyond 32
/// bits. The sums of leaf `leaf` lie in unit `leaf` of row `row`.
pub fn leaf_place(row: u64, leaf: u64) -> Option<u32> {
    const { assert!(ROW_VALUES.is_multiple_of(MAX_SUMS as u64)) };
    debug_assert!(leaf < CHUNK_UNITS);
    let place = row.checked_mul(ROW_VALUES / MAX_SUMS as u64)? + leaf;
    u32::try_from(place).ok()
}

/// The sums over whole tensors that a kernel with norms needs to update parts of them.
#[derive(Clone, Copy)]
pub enum TensorSums<'a> {
    /// On the host, for each tensor of the storage ([`crate::Launches::leaf_sums`], folded by the
    /// caller).
    Host(&'a [[f64; MAX_SUMS]]),
    /// On a device, where they are yet to be added up.
    Device(ChunkSums<'a>),
}

/// Sums over the chunks of tensors in a device's memory.
#[derive(Clone, Copy)]
pub struct ChunkSums<'a> {
    /// [`MAX_SUMS`] f64 for every chunk.
    pub sums: &'a dyn Buffer,
    /// For every parameter its chunks, as [`crate::TensorPartials`].
    pub tensors: &'a dyn Buffer,
}
