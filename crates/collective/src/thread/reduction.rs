//! The collectives that reduce.

use std::ops::Range;

use super::algorithms::{Cut, Round};
use super::engine::Threads;
use super::group::{Header, Placement};
use crate::rendezvous::{Claim, Peers};
use crate::{
    Begun, Blocks, Buffers, Call, CollectiveError, Column, OfRanks, Receivers, ReduceOp, Sharing,
};

impl Threads {
    /// Makes an all-reduce, a reduce or a reduce-scatter. Each rank reduces its part straight from
    /// where the elements of all ranks lie, then what is left of other parts.
    pub(super) fn reduction(
        &mut self,
        begun: &mut Begun<'_>,
        round: Round<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank;
        let sharing = Sharing::new(&call, blocks, op, &self.group.options);
        let cut = match sharing.receivers {
            Receivers::Owner => Cut::Blocks(blocks, call.dtype.len_bytes()),
            _ => Cut::Lines,
        };
        let round = Round { cut, reserved: sharing.claim_bytes, ..round };
        let round = bring(round, rank, sharing.receivers, call.buffers);
        self.round(begun, round, |peers| {
            let mut reserved = Some(peers.reserved());
            sharing.reduce(rank, &(0..sharing.whole_bytes()), |owner, part| {
                let claim = || peers.claim(owner, sharing.claim_bytes);
                let mut claim = reserved.take().unwrap_or_else(claim);
                sharing.reduce_claim(owner, part, claim.range(), |bytes| {
                    columns(peers, &mut claim, bytes)
                })
            });
        })
    }
}

/// Memory that a rank brings to a reduction, added to `round`.
fn bring<'a>(
    round: Round<'a>,
    rank: usize,
    receivers: Receivers,
    buffers: Buffers<'a>,
) -> Round<'a> {
    let (shared, writable, cut) = match (buffers, receivers) {
        (Buffers::InPlace(writable), _) => (&[][..], writable, round.cut),
        (Buffers::OutOfPlace { send, .. }, Receivers::Rank(root)) if root != rank => {
            (send, &mut [][..], Cut::None)
        }
        (Buffers::OutOfPlace { send, receive }, Receivers::Owner) => (send, receive, Cut::Own),
        (Buffers::OutOfPlace { send, receive }, _) => (send, receive, round.cut),
    };
    Round { shared, writable, cut, ..round }
}

/// The elements of all ranks in `claim`, whose bytes are `bytes` of the whole.
fn columns<'a>(
    peers: &'a Peers<'_, Header>,
    claim: &'a mut Claim<'_, Header>,
    bytes: Range<usize>,
) -> OfRanks<Column<'a>> {
    let mut columns = OfRanks::new();
    for (rank, writable) in claim.all_mut().enumerate() {
        let shared = match peers.header(rank).placement {
            Placement::Writable => None,
            Placement::Shared => Some(&peers.shared(rank)[bytes.clone()]),
        };
        columns.push(Column { shared, writable });
    }
    columns
}
