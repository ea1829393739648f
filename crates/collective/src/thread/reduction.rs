//! The collectives that reduce.

use std::ops::Range;

use fusestep_simd::{Claim, Peers};
use smallvec::SmallVec;

use super::ThreadCommunicator;
use super::algorithms::{Cut, Round};
use super::group::{Header, Placement};
use crate::{
    Blocks, Buffers, Call, CollectiveError, Column, Columns, Operation, Receivers, ReduceOp,
};

/// Parts of a reduction end at multiples of this, a cache line, so that ranks share few lines.
const LINE_BYTES: usize = 64;

const _: () = assert!(LINE_BYTES.is_multiple_of(8), "no element is cut in two");

impl ThreadCommunicator {
    /// All-reduce, reduce and reduce-scatter: each rank reduces its part straight from where the
    /// others' elements lie, then what is left of theirs.
    pub(super) fn reduction(
        &mut self,
        round: Round<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let (rank, world_size) = (self.rank, self.ends.len());
        let (level, claim_bytes) = {
            let options = self.group.options();
            (options.level, claim_bytes(options.claim_bytes))
        };
        let element_bytes = call.dtype.len_bytes();
        let whole_bytes = blocks.numel * element_bytes;
        let cut = match call.operation {
            Operation::ReduceScatter(_) => Cut::Blocks(blocks, element_bytes),
            _ => Cut::Lines,
        };
        let part = |owner: usize| match cut {
            Cut::Blocks(..) => blocks.of_bytes(owner, element_bytes),
            _ => lines(whole_bytes, owner, world_size),
        };
        let reserved = claim_bytes;
        let (round, receivers) = bring(
            Round {
                cut,
                reserved,
                ..round
            },
            rank,
            call.operation,
            call.buffers,
        );
        self.round(round, |peers| {
            let mut reserved = peers.reserved();
            let reduce_claim = |owner, part: &Range<usize>, claim: &mut Claim<'_, _>| {
                let Range { start, end } = claim.range();
                let (start, end) = (start.min(part.len()), end.min(part.len()));
                let mut columns = Columns {
                    columns: &mut columns(peers, claim, part.start + start..part.start + end),
                    receivers: receivers.of_part(owner, world_size),
                    share_bytes: part.len(),
                };
                columns.reduce(level, call.dtype, op, end - start);
                end < part.len()
            };
            reduce_claim(rank, &part(rank), &mut reserved);
            if whole_bytes > claim_bytes {
                for owner in (rank..world_size).chain(0..rank) {
                    let part = part(owner);
                    // A part that is no longer was reserved for its owner.
                    let mut more = part.len() > claim_bytes;
                    while more {
                        more = reduce_claim(owner, &part, &mut peers.claim(owner, claim_bytes));
                    }
                }
            }
        })
    }
}

/// What a rank brings to a reduction, `round` with its memory, and where results go.
fn bring<'a>(
    round: Round<'a>,
    rank: usize,
    operation: Operation,
    buffers: Buffers<'a>,
) -> (Round<'a>, Receivers) {
    let receivers = Receivers::of_operation(operation);
    let (shared, writable, cut): (&[u8], _, _) = match (buffers, receivers) {
        (Buffers::InPlace(writable), _) => (&[], writable, round.cut),
        (Buffers::OutOfPlace { send, .. }, Receivers::Rank(root)) if root != rank => {
            (send, &mut [][..], Cut::None)
        }
        (Buffers::OutOfPlace { send, receive }, Receivers::Owner) => (send, receive, Cut::Own),
        (Buffers::OutOfPlace { send, receive }, _) => (send, receive, round.cut),
    };
    (
        Round {
            shared,
            writable,
            cut,
            ..round
        },
        receivers,
    )
}

/// A length of claims that ends with a cache line.
fn claim_bytes(asked: usize) -> usize {
    let longest = usize::MAX / LINE_BYTES * LINE_BYTES;
    asked.clamp(1, longest).next_multiple_of(LINE_BYTES)
}

/// The part of `len_bytes` bytes that rank `rank` reduces.
pub(super) fn lines(len_bytes: usize, rank: usize, world_size: usize) -> Range<usize> {
    let lines = Blocks {
        numel: len_bytes.div_ceil(LINE_BYTES),
        world_size,
        counts: None,
    };
    let own = lines.of_bytes(rank, LINE_BYTES);
    own.start.min(len_bytes)..own.end.min(len_bytes)
}

/// The ranks' elements in `claim`, which begins and ends at `bytes` of the whole.
fn columns<'a>(
    peers: &'a Peers<'_, Header>,
    claim: &'a mut Claim<'_, Header>,
    bytes: Range<usize>,
) -> SmallVec<[Column<'a>; 16]> {
    let mut columns = SmallVec::new();
    for (rank, writable) in claim.all_mut().enumerate() {
        let shared = match peers.header(rank).placement {
            Placement::Writable => None,
            Placement::Shared => Some(&peers.shared(rank)[bytes.clone()]),
        };
        columns.push(Column { shared, writable });
    }
    columns
}
