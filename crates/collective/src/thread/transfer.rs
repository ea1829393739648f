//! Sends and receives: a rendezvous of two ranks, kept from one transfer of a pair to the next.

use fusestep_simd::Contribution;

use super::ThreadCommunicator;
use super::group::{Header, Placement};
use crate::{Buffers, Call, CollectiveError, Fingerprint, Operation};

impl ThreadCommunicator {
    /// A send or a receive, from `pair.0` to `pair.1`; party 0 of a pair's rendezvous is the
    /// sender.
    pub(super) fn transfer(
        &mut self,
        call: Call<'_>,
        numel: usize,
        pair: (usize, usize),
    ) -> Result<(), CollectiveError> {
        let side = usize::from(self.rank == pair.1);
        let (mut participant, transfers) = match self.pairs.remove(&pair) {
            Some(known) => known,
            None => (self.group.pair_participant(pair, side)?, 0),
        };
        let mut fingerprint = call.shape().fingerprint(numel, transfers + 1, self.context);
        let own_name = call.operation;
        let (header, deadline) = self.header(fingerprint, Placement::Shared);
        fingerprint.operation = Operation::Send { to: pair.1 };
        let (shared, receive): (&[u8], &mut [u8]) = match call.buffers {
            Buffers::InPlace(buffer) if side == 0 => (buffer, &mut []),
            Buffers::InPlace(buffer) => (&[], buffer),
            Buffers::OutOfPlace { send, .. } if side == 0 => (send, &mut []),
            Buffers::OutOfPlace { receive, .. } => (&[], receive),
        };
        let contribution = Contribution {
            header: Header { fingerprint, ..header },
            shared,
            writable: &mut [],
            ends: &[0, 0],
            reserved: 0,
            replicas: Default::default(),
            replica_ends: &[],
        };
        let named = Fingerprint { operation: own_name, ..fingerprint };
        let timeout = self.group.options.timeout;
        let (group, own) = (&self.group, self.rank);
        let late = |sides: &[usize]| {
            let ranks: Vec<usize> = sides.iter().map(|&side| [pair.0, pair.1][side]).collect();
            named.late(group.behind(own, &ranks), timeout)
        };
        group.set_transfer(own, Some([pair.1, pair.0][side]));
        let outcome = participant.rendezvous(contribution, deadline, late, |peers| {
            let compared = Fingerprint::compare(2, |side| &peers.header(side).fingerprint);
            compared.map_err(|error| error.with_ranks(&[pair.0, pair.1]))?;
            if side == 1 {
                receive.copy_from_slice(peers.shared(0));
            }
            Ok(())
        });
        // Until the group is closed others whose deadline comes now have to see that this rank only
        // waited; it is closed by this error, and what is written down says no more then.
        if !matches!(outcome, Err(CollectiveError::Late { .. })) {
            group.set_transfer(own, None);
        }
        self.pairs.insert(pair, (participant, transfers + 1));
        outcome?
    }
}
