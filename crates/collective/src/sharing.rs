//! Sharing of a reduction between ranks that see each other's memory. Each rank has a part and
//! reduces it in claims, so that a rank that is done goes on with the rest of other parts.

use std::ops::Range;

use fusestep_simd::Level;
use fusestep_tensor::DType;

use crate::{Blocks, Call, Column, Columns, OfRanks, Options, Receivers, ReduceOp};

/// Multiple of bytes at which parts of a reduction end: a cache line, so that ranks share few
/// lines.
const LINE_BYTES: usize = 64;

const _: () = assert!(LINE_BYTES.is_multiple_of(8), "no element is cut in two");

/// Facts of a reduction that all ranks know.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'a> {
    /// The ranks that get results.
    pub receivers: Receivers,
    /// The ranks' blocks of the whole.
    pub blocks: Blocks<'a>,
    /// The elements' type.
    pub dtype: DType,
    /// Bytes that a rank reduces before it claims more, in whole cache lines.
    pub claim_bytes: usize,
    op: ReduceOp,
    level: Level,
}

impl<'a> Sharing<'a> {
    /// The sharing of a call, which reduces by `op`.
    pub fn new(call: &Call<'_>, blocks: Blocks<'a>, op: ReduceOp, options: &Options) -> Self {
        let longest = usize::MAX / 4 / LINE_BYTES * LINE_BYTES;
        let claim_bytes = options.claim_bytes.clamp(1, longest);
        Self {
            receivers: Receivers::of_operation(call.operation),
            blocks,
            dtype: call.dtype,
            claim_bytes: claim_bytes.next_multiple_of(LINE_BYTES),
            op,
            level: options.level,
        }
    }

    /// Bytes of the whole.
    pub fn whole_bytes(&self) -> usize {
        self.blocks.numel * self.dtype.len_bytes()
    }

    /// The block of a rank, in bytes of the whole.
    pub fn block(&self, rank: usize) -> Range<usize> {
        self.blocks.of_bytes(rank, self.dtype.len_bytes())
    }

    /// The bytes of `range` that rank `owner` is to reduce.
    pub fn part(&self, owner: usize, range: &Range<usize>) -> Range<usize> {
        if self.receivers == Receivers::Owner {
            return common(&self.block(owner), range);
        }
        let own = lines(range.len(), owner, self.blocks.world_size);
        range.start + own.start..range.start + own.end
    }

    /// Reduces this rank's part of `range`, then what is left of the other ranks' parts.
    /// `reduce_claim` is given a rank and its part, and claims more bytes of that part; its first
    /// claim is what is reserved for this rank. It says whether there may be more; see
    /// [`reduce_claim`](Self::reduce_claim).
    pub fn reduce(
        &self,
        rank: usize,
        range: &Range<usize>,
        mut reduce_claim: impl FnMut(usize, &Range<usize>) -> bool,
    ) {
        reduce_claim(rank, &self.part(rank, range));
        if range.len() <= self.claim_bytes {
            return;
        }
        for owner in (rank..self.blocks.world_size).chain(0..rank) {
            let part = self.part(owner, range);
            // A part of at most one claim was reserved for its owner.
            let mut more = part.len() > self.claim_bytes;
            while more {
                more = reduce_claim(owner, &part);
            }
        }
    }

    /// Reduces the claimed bytes of the part of `owner`; says whether the part may have more.
    /// `columns` gives the memory of all ranks for bytes of the whole.
    pub fn reduce_claim<'c>(
        &self,
        owner: usize,
        part: &Range<usize>,
        claim: Range<usize>,
        columns: impl FnOnce(Range<usize>) -> OfRanks<Column<'c>>,
    ) -> bool {
        let (start, end) = (claim.start.min(part.len()), claim.end.min(part.len()));
        if start == end {
            return false;
        }
        let mut columns = Columns {
            columns: &mut columns(part.start + start..part.start + end),
            receivers: self.receivers.of_part(owner, self.blocks.world_size),
            share_bytes: part.len(),
        };
        columns.reduce(self.level, self.dtype, self.op, end - start);
        end < part.len()
    }
}

/// The part of `len_bytes` bytes that rank `rank` reduces, where whole cache lines are shared out
/// evenly.
pub(crate) fn lines(len_bytes: usize, rank: usize, world_size: usize) -> Range<usize> {
    let lines = Blocks { numel: len_bytes.div_ceil(LINE_BYTES), world_size, counts: None };
    let own = lines.of_bytes(rank, LINE_BYTES);
    own.start.min(len_bytes)..own.end.min(len_bytes)
}

/// The elements that two ranges have in common; if there are none, an empty range within the first.
pub fn common(x: &Range<usize>, y: &Range<usize>) -> Range<usize> {
    let start = x.start.max(y.start).min(x.end);
    start..x.end.min(y.end).max(start)
}
