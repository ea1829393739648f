//! Chunks of a reduction as one piece of work that can be cut between any two of them.

use fusestep_launch::{BackendError, Batch, Buffer, MultiTensorReduction, Record, SquareSum};
use fusestep_simd::{Level, Split};

use crate::errors::{FOREIGN, out_of_bounds};

/// Consecutive chunks of a reduction and the places of their sums.
pub(crate) struct ChunkPieces<'a> {
    kernel: &'a dyn MultiTensorReduction,
    level: Level,
    chunks: Chunks<'a>,
    /// The whole list.
    list: &'a [u8],
    /// Places of the sums, one for each chunk.
    sums: &'a mut [SquareSum],
    /// Number of elements of all the chunks.
    elements: u64,
}

impl<'a> ChunkPieces<'a> {
    /// All chunks of these batches; `sums` has one place for each chunk.
    pub(crate) fn new(
        kernel: &'a dyn MultiTensorReduction,
        level: Level,
        batches: &'a [Batch],
        offsets: &'a [u64],
        list: &'a [u8],
        sums: &'a mut [SquareSum],
    ) -> Self {
        Self {
            kernel,
            level,
            chunks: Chunks {
                batches: batches.iter(),
                records: [].iter(),
                record: None,
                offsets,
                chunk_elements: u64::from(kernel.chunk_elements()),
            },
            list,
            sums,
            elements: batches.iter().map(Batch::elements).sum(),
        }
    }
}

impl Split for ChunkPieces<'_> {
    fn elements(&self) -> u64 {
        self.elements
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut rest, mut taken, mut count) = (self.chunks.clone(), 0, 0);
        while taken < elements && count < self.sums.len() {
            let Some((_, numel)) = rest.next() else { break };
            taken += numel;
            count += 1;
        }
        let Self { kernel, level, list, .. } = self;
        let (left_sums, right_sums) = self.sums.split_at_mut(count);
        let part =
            |chunks, sums, elements| ChunkPieces { kernel, level, chunks, list, sums, elements };
        (part(self.chunks, left_sums, taken), part(rest, right_sums, self.elements - taken))
    }

    fn run(self) {
        let width = self.kernel.list().dtype.len_bytes();
        for (sum, (first, numel)) in self.sums.iter_mut().zip(self.chunks) {
            // The list lies in memory, so element counts fit a usize.
            let (first, numel) = (first as usize, numel as usize);
            let chunk = &self.list[first * width..(first + numel) * width];
            *sum = self.kernel.run_host(self.level, chunk);
        }
    }
}

/// First storage element and element count of each chunk of some batches, in order.
#[derive(Clone)]
struct Chunks<'a> {
    batches: std::slice::Iter<'a, Batch>,
    records: std::slice::Iter<'a, Record>,
    /// Rest of the current record: its first storage element and element count.
    record: Option<(u64, u64)>,
    offsets: &'a [u64],
    chunk_elements: u64,
}

impl Iterator for Chunks<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let (first, left) = loop {
            if let Some(record) = self.record.take() {
                break record;
            }
            match self.records.next() {
                Some(record) => {
                    let first = self.offsets[record.tensor as usize] + record.first_element;
                    self.record = Some((first, record.numel));
                }
                None => self.records = self.batches.next()?.records.iter(),
            }
        };
        let numel = left.min(self.chunk_elements);
        if left > numel {
            self.record = Some((first + numel, left - numel));
        }
        Some((first, numel))
    }
}

/// The places of the sums of all chunks of `batches`, of which the first has number `first`.
pub(crate) fn partials<'a>(
    buffer: &'a mut dyn Buffer,
    first: u64,
    batches: &[Batch],
) -> Result<&'a mut [SquareSum], BackendError> {
    let found = buffer.len_bytes();
    let sums: &mut [SquareSum] = bytemuck::cast_slice_mut(buffer.host_mut().ok_or(FOREIGN)?);
    let chunks: u64 = batches.iter().map(|b| u64::from(b.chunks)).sum();
    let (first, chunks) = (first as usize, chunks as usize);
    let places = sums.get_mut(first..).and_then(|rest| rest.get_mut(..chunks));
    places.ok_or_else(|| {
        let width = size_of::<SquareSum>();
        out_of_bounds(first * width, chunks * width, found)
    })
}
