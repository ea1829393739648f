//! The collectives that reduce.

use std::ops::Range;

use fusestep_simd::Peers;

use super::ThreadCommunicator;
use super::algorithms::{Cut, Round};
use super::group::{Header, Placement};
use crate::rank_order::{Ranks, reduce_in_rank_order};
use crate::{Blocks, Buffers, Call, CollectiveError, Operation, ReduceOp};

/// Parts of a reduction end at multiples of this, a cache line, so that ranks share few lines.
const LINE_BYTES: usize = 64;

const _: () = assert!(LINE_BYTES.is_multiple_of(8), "no element is cut in two");

impl ThreadCommunicator {
    /// All-reduce, reduce and reduce-scatter: each rank reduces its part straight from where the others' elements lie.
    pub(super) fn reduction(
        &mut self,
        round: Round<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let (rank, world_size, level) = (self.rank, self.ends.len(), self.group.options().level);
        let element_bytes = call.dtype.len_bytes();
        let (whole_bytes, block) = (
            blocks.numel * element_bytes,
            blocks.of_bytes(rank, element_bytes),
        );
        let (cut, own) = match call.operation {
            Operation::ReduceScatter(_) => (Cut::Blocks(blocks, element_bytes), block),
            _ => (Cut::Lines, lines(whole_bytes, rank, world_size)),
        };
        let (round, into) = match (call.operation, call.buffers) {
            (Operation::Reduce { root, .. }, Buffers::Apart { send, receive }) => {
                let (lent, cut) = match rank == root {
                    true => (receive, cut),
                    false => (&mut [][..], Cut::None),
                };
                (
                    Round {
                        shared: send,
                        lent,
                        cut,
                        ..round
                    },
                    Into::Rank(root),
                )
            }
            (Operation::Reduce { root, .. }, Buffers::InPlace(lent)) => {
                (Round { lent, cut, ..round }, Into::Rank(root))
            }
            (Operation::ReduceScatter(_), Buffers::Apart { send, receive }) => (
                Round {
                    shared: send,
                    ..round
                },
                Into::Slice(receive),
            ),
            (Operation::ReduceScatter(_), Buffers::InPlace(lent)) => {
                (Round { lent, cut, ..round }, Into::Rank(rank))
            }
            (
                _,
                Buffers::Apart {
                    send,
                    receive: lent,
                },
            ) => (
                Round {
                    shared: send,
                    lent,
                    cut,
                    ..round
                },
                Into::All,
            ),
            (_, Buffers::InPlace(lent)) => (Round { lent, cut, ..round }, Into::All),
        };
        self.round(round, |peers| {
            let len_bytes = own.len();
            let mut columns = Columns { peers, own, into };
            reduce_in_rank_order(level, call.dtype, op, len_bytes, &mut columns);
        })
    }
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

/// Where the result of a reduction goes.
enum Into<'a> {
    /// To this rank's part of everyone's lent memory.
    All,
    /// To this rank's part of one rank's lent memory.
    Rank(usize),
    /// To memory of this rank's own.
    Slice(&'a mut [u8]),
}

/// This rank's part of every rank's elements, where they lie.
struct Columns<'a, 'p> {
    peers: &'a mut Peers<'p, Header>,
    /// The part within the whole.
    own: Range<usize>,
    into: Into<'a>,
}

impl Ranks for Columns<'_, '_> {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.peers.parties()
    }

    #[inline(always)]
    fn input(&self, rank: usize, bytes: Range<usize>) -> &[u8] {
        match self.peers.header(rank).placement {
            Placement::Lent => &self.peers.lent(rank)[bytes],
            Placement::Shared => {
                &self.peers.shared(rank)[self.own.start + bytes.start..self.own.start + bytes.end]
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, bytes: Range<usize>, result: &[u8]) {
        match &mut self.into {
            Into::All => {
                for rank in 0..self.peers.parties() {
                    self.peers.lent_mut(rank)[bytes.clone()].copy_from_slice(result);
                }
            }
            Into::Rank(rank) => self.peers.lent_mut(*rank)[bytes].copy_from_slice(result),
            Into::Slice(slice) => slice[bytes].copy_from_slice(result),
        }
    }
}
