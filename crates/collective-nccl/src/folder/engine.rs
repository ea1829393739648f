//! The engine of a folder: ranks leave each other files.

use std::sync::Arc;
use std::time::Instant;

use fusestep_collective::{
    Aborter, Begun, Blocks, Call, CollectiveError, Engine, Fingerprint, Membership, Movement,
    Operation, Pair, Place,
};

use super::files::{Files, pause};

/// Bytes of the fingerprint at the start of each file.
const PRINT_BYTES: usize = Fingerprint::WIRE_BYTES;

/// One rank's engine in a group that shares a folder.
#[derive(Debug)]
pub(super) struct InFolder {
    files: Arc<Files>,
    world_size: usize,
    begun: Instant,
}

/// Ranks of an exchange, and the names of its files.
struct Parties {
    name: String,
    ranks: Vec<usize>,
    /// This rank's file of the exchange before. All parties have read that file when this exchange
    /// is through.
    before: String,
}

impl Parties {
    /// The ranks of an exchange, whose files `name` names by the number of the call.
    fn new(
        begun: &Begun<'_>,
        rank: usize,
        ranks: Vec<usize>,
        name: impl Fn(u64) -> String,
    ) -> Self {
        let sequence = begun.print.sequence;
        Self { name: name(sequence), ranks, before: format!("{}-{rank}", name(sequence - 1)) }
    }
}

impl InFolder {
    pub(super) fn new(files: Files, world_size: usize) -> Self {
        Self { files: Arc::new(files), world_size, begun: Instant::now() }
    }

    /// The exchange of a call of all ranks.
    fn everyone(&self, begun: &Begun<'_>) -> Parties {
        let ranks = (0..self.world_size).collect();
        Parties::new(begun, self.files.rank, ranks, |sequence| format!("call-{sequence}"))
    }

    /// Leaves `payload` for the other parties and waits for theirs. Returns all payloads, in the
    /// order of parties.
    fn exchange(
        &self,
        begun: &Begun<'_>,
        parties: &Parties,
        payload: &[u8],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if let Some(closed) = self.files.closing(parties.ranks.iter().copied()) {
            return Err(closed);
        }
        let own = [&begun.print.to_bytes()[..], payload].concat();
        let file = |rank: usize| format!("{}-{rank}", parties.name);
        let published = self.files.publish(&file(self.files.rank), &own);
        published.map_err(|error| self.failed(begun, error))?;
        let all = self.gathered(begun, parties, file)?;
        self.files.withdraw(&parties.before);
        let heads = all.iter().map(|bytes| bytes.get(..PRINT_BYTES).unwrap_or_default());
        let prints = begun.named().read_all(self.files.rank, heads)?;
        let compared = Fingerprint::compare(prints.len(), |index| &prints[index]);
        compared.map_err(|error| error.with_ranks(&parties.ranks))?;
        Ok(all.into_iter().map(|mut bytes| bytes.split_off(PRINT_BYTES)).collect())
    }

    /// An error of the operating system as an error of the call.
    fn failed(&self, begun: &Begun<'_>, error: impl ToString) -> CollectiveError {
        CollectiveError::engine(self.files.rank, begun.operation.name(), error)
    }

    /// Waits for the parties' files.
    fn gathered(
        &self,
        begun: &Begun<'_>,
        parties: &Parties,
        file: impl Fn(usize) -> String,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let mut all: Vec<Option<Vec<u8>>> = vec![None; parties.ranks.len()];
        let mut look = || -> Result<Vec<usize>, CollectiveError> {
            let mut missing = Vec::new();
            for (found, &rank) in all.iter_mut().zip(&parties.ranks) {
                if found.is_none() {
                    let read = self.files.read(&file(rank));
                    *found = read.map_err(|error| self.failed(begun, error))?;
                }
                if found.is_none() {
                    missing.push(rank);
                }
            }
            Ok(missing)
        };
        let mut looks = 0;
        loop {
            let missing = look()?;
            if missing.is_empty() {
                break;
            }
            if let Some(closed) = self.files.closing(missing.iter().copied()) {
                // A rank that has left since the look may have left its file of this call, too.
                if look()?.is_empty() {
                    break;
                } else {
                    return Err(closed);
                }
            }
            if Instant::now() > begun.deadline {
                return Err(begun.named().late(missing, begun.timeout));
            }
            pause(looks);
            looks += 1;
        }
        Ok(all.into_iter().flatten().collect())
    }

    /// Leaves what this rank shows, and takes what it needs of the others.
    fn make(
        &self,
        begun: &Begun<'_>,
        parties: &Parties,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let movement = Movement {
            operation: call.operation,
            blocks: &blocks.all_bytes(call.dtype.len_bytes()),
        };
        let share = movement.share(self.files.rank, call.buffers);
        let all = self.exchange(begun, parties, &share.shown)?;
        for pull in share.pulls {
            let party = match call.operation {
                // The sender is the first of two parties.
                Operation::Receive { .. } => 0,
                _ => pull.from,
            };
            let found = &all[party];
            if found.len() != pull.range.len() {
                let (bytes, from, expected) = (found.len(), pull.from, pull.range.len());
                let reason = format!("{bytes} bytes of rank {from} in place of {expected}");
                return Err(self.failed(begun, reason));
            }
            pull.into.copy_from_slice(found);
        }
        Ok(())
    }
}

impl Engine for InFolder {
    fn place(&self) -> Place {
        Place { rank: self.files.rank, world_size: self.world_size, begun: self.begun }
    }

    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        self.make(begun, &self.everyone(begun), call, blocks)
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        call: Call<'_>,
        blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        let Pair { sender, receiver } = pair;
        let name = |sequence| format!("transfer-{sender}-{receiver}-{sequence}");
        let parties = Parties::new(begun, self.files.rank, pair.ranks().to_vec(), name);
        self.make(begun, &parties, call, blocks)
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        let word = membership.map(|own| own.to_word().to_le_bytes());
        let payload: &[u8] = word.as_ref().map_or(&[], |word| word);
        let all = self.exchange(begun, &self.everyone(begun), payload)?;
        let Some(own) = membership else {
            return Ok(None);
        };
        let members = own.members(self.world_size, |rank| {
            let word = u64::from_le_bytes(all[rank].as_slice().try_into().ok()?);
            Some(Membership::from_word(word))
        });
        let place = members.iter().position(|&rank| rank == self.files.rank);
        let name = format!("group-{}-{}", begun.print.sequence, own.colour);
        let folder = self.files.folder.join(name);
        std::fs::create_dir_all(&folder).map_err(|error| self.failed(begun, error))?;
        let place = place.expect("this rank's own membership is among all");
        let files = Files::new(folder, place, self.files.chain());
        Ok(Some(Self::new(files, members.len())))
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        self.files.close(error)
    }

    fn leave(&mut self, last: CollectiveError) {
        let (CollectiveError::Left { calls, .. } | CollectiveError::Panicked { calls, .. }) = last
        else {
            return;
        };
        if let CollectiveError::Panicked { .. } = last {
            self.files.close(last);
        }
        self.files.leave(self.world_size, calls);
    }

    fn aborter(&self) -> Aborter {
        let world_size = self.world_size;
        let close = |files: &Files, error| drop(files.close(error));
        Aborter::of(self.files.rank, &self.files, close, move |files| files.closing(0..world_size))
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.files.closing(0..self.world_size)
    }

    fn carries(&self, operation: Operation) -> Result<(), &'static str> {
        match operation {
            Operation::Barrier
            | Operation::AllGather
            | Operation::Broadcast { .. }
            | Operation::Send { .. }
            | Operation::Receive { .. } => Ok(()),
            _ => Err("expected all-gather, broadcast, a transfer, a barrier or a split through a \
                 folder, which carries what ranks say and no gradients; use the communicator that \
                 was made on it"),
        }
    }
}
