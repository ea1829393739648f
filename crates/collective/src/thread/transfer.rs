//! Sends and receives: a rendezvous of two ranks, kept from one transfer of a pair to the next.

use super::engine::Threads;
use super::group::{Header, Placement};
use crate::rendezvous::Contribution;
use crate::{Begun, Buffers, Call, CollectiveError, Fingerprint, Pair};

impl Threads {
    /// Makes a send or a receive. Party 0 of a pair's rendezvous is the sender.
    pub(super) fn between_two(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
    ) -> Result<(), CollectiveError> {
        let side = pair.side(self.rank);
        let mut participant = match self.pairs.remove(&pair) {
            Some(known) => known,
            None => self.group.pair_participant(pair, side)?,
        };
        let (shared, receive) = match call.buffers {
            Buffers::InPlace(buffer) if side == 0 => (&*buffer, &mut [][..]),
            Buffers::InPlace(buffer) => (&[][..], buffer),
            Buffers::OutOfPlace { send, .. } if side == 0 => (send, &mut [][..]),
            Buffers::OutOfPlace { receive, .. } => (&[][..], receive),
        };
        let contribution = Contribution {
            header: Header::of(begun, Placement::Shared),
            shared,
            writable: &mut [],
            ends: &[0, 0],
            reserved: 0,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let (group, own) = (&self.group, self.rank);
        let late = |sides: &[usize]| {
            let ranks: Vec<usize> = sides.iter().map(|&side| pair.ranks()[side]).collect();
            begun.named().late(group.behind(own, &ranks), begun.timeout)
        };
        group.set_transfer(own, Some(pair.peer(own)));
        let outcome = participant.rendezvous(contribution, begun.deadline, late, |peers| {
            let compared = Fingerprint::compare(2, |side| &peers.header(side).fingerprint);
            compared.map_err(|error| error.with_ranks(&pair.ranks()))?;
            if side == 1 {
                receive.copy_from_slice(peers.shared(0));
            }
            Ok(())
        });
        // Until this error closes the group, other ranks whose deadline passes now must see that
        // this rank only waited. After that the entry says no more.
        if !matches!(outcome, Err(CollectiveError::Late { .. })) {
            group.set_transfer(own, None);
        }
        self.pairs.insert(pair, participant);
        outcome?
    }
}
