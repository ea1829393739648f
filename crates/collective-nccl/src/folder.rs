//! Ranks that are processes and have nothing in common but a folder.

mod files;
mod meeting;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fusestep_collective::{
    Aborter, Blocks, Call, CallContext, CallShape, CollectiveError, Communicator, Fingerprint,
    FlightRecorder, Membership, Movement, Operation,
};

use files::{Files, pause};
pub use meeting::Meeting;

/// Bytes before what a rank says in a file.
const PRINT_BYTES: usize = Fingerprint::WIRE_BYTES;

/// A control communicator for processes that nobody started together: ranks leave each other files
/// in a folder that all of them see. Made by [`Meeting::join`].
///
/// It carries what a control communicator must: all-gather, broadcast, transfers, barriers and
/// splits. It moves no gradients: reductions and the rest are refused.
///
/// # Cost
/// Some files per call and a look at the folder every 5 ms at most; `mpirun` is the faster way to
/// start processes.
#[derive(Debug)]
pub struct FolderControl {
    files: Arc<Files>,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    sequence: u64,
    /// Transfers made, by sender and receiver.
    made: HashMap<(usize, usize), u64>,
    context: CallContext,
    recorder: FlightRecorder,
}

/// Who takes part in an exchange, and under which name.
struct Parties {
    name: String,
    ranks: Vec<usize>,
    /// The file of this exchange before, which all have read when this one is through.
    before: String,
}

impl FolderControl {
    fn new(files: Files, world_size: usize, timeout: Duration) -> Self {
        let rank = files.rank;
        Self {
            recorder: FlightRecorder::new(rank, world_size, 256, Instant::now()),
            files: Arc::new(files),
            rank,
            world_size,
            timeout,
            sequence: 0,
            made: HashMap::new(),
            context: CallContext::default(),
        }
    }

    /// Counts a call and says who takes part in it.
    fn begin(&mut self, shape: &CallShape<'_>, numel: usize) -> (Fingerprint, Parties) {
        let rank = self.rank;
        let pair = shape.operation.pair(rank);
        let sequence = match pair {
            Some(pair) => self.made.entry(pair).or_insert(0),
            None => &mut self.sequence,
        };
        *sequence += 1;
        let sequence = *sequence;
        let print = shape.fingerprint(numel, sequence, self.context);
        self.recorder.begin(&print);
        let named = |sequence: u64| match pair {
            None => format!("call-{sequence}"),
            Some((from, to)) => format!("transfer-{from}-{to}-{sequence}"),
        };
        let parties = Parties {
            name: named(sequence),
            ranks: pair.map_or_else(|| (0..self.world_size).collect(), |(from, to)| vec![from, to]),
            before: format!("{}-{rank}", named(sequence - 1)),
        };
        (print, parties)
    }

    /// Leaves `payload` for the other parties and waits for theirs; what each has left, in the
    /// order of parties.
    fn exchange(
        &self,
        print: &Fingerprint,
        parties: &Parties,
        payload: &[u8],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if let Some(closed) = self.files.closing(parties.ranks.iter().copied()) {
            return Err(closed);
        }
        let mut said = *print;
        if let (Operation::Receive { .. }, [_, to]) = (print.operation, &parties.ranks[..]) {
            said.operation = Operation::Send { to: *to };
        }
        let own = [&said.to_bytes()[..], payload].concat();
        let file = |rank: usize| format!("{}-{rank}", parties.name);
        let published = self.files.publish(&file(self.rank), &own);
        published.map_err(|error| self.failed(print, error))?;
        let all = self.gathered(print, parties, file)?;
        self.files.withdraw(&parties.before);
        let heads = all.iter().map(|bytes| bytes.get(..PRINT_BYTES).unwrap_or_default());
        let prints = print.read_all(self.rank, heads)?;
        let compared = Fingerprint::compare(prints.len(), |index| &prints[index]);
        compared.map_err(|error| error.with_ranks(&parties.ranks))?;
        Ok(all.into_iter().map(|mut bytes| bytes.split_off(PRINT_BYTES)).collect())
    }

    /// What the system says of a file.
    fn failed(&self, print: &Fingerprint, error: impl ToString) -> CollectiveError {
        CollectiveError::engine(self.rank, print.operation.name(), error)
    }

    /// Waits for the parties' files.
    fn gathered(
        &self,
        print: &Fingerprint,
        parties: &Parties,
        file: impl Fn(usize) -> String,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let mut all: Vec<Option<Vec<u8>>> = vec![None; parties.ranks.len()];
        let mut look = || -> Result<Vec<usize>, CollectiveError> {
            let mut missing = Vec::new();
            for (found, &rank) in all.iter_mut().zip(&parties.ranks) {
                if found.is_none() {
                    let read = self.files.read(&file(rank));
                    *found = read.map_err(|error| self.failed(print, error))?;
                }
                if found.is_none() {
                    missing.push(rank);
                }
            }
            Ok(missing)
        };
        let (begun, mut looks) = (Instant::now(), 0);
        loop {
            let missing = look()?;
            if missing.is_empty() {
                break;
            }
            if let Some(closed) = self.files.closing(missing.iter().copied()) {
                // Who has done its part of this call and left since the look has left its file too.
                if look()?.is_empty() {
                    break;
                } else {
                    return Err(closed);
                }
            }
            if begun.elapsed() > self.timeout {
                return Err(print.late(missing, self.timeout));
            }
            pause(looks);
            looks += 1;
        }
        Ok(all.into_iter().flatten().collect())
    }

    /// Checks a call.
    fn check<'a>(&self, call: &Call<'a>) -> Result<Blocks<'a>, CollectiveError> {
        let blocks = call.blocks(self.rank, self.world_size)?;
        match call.operation {
            Operation::Barrier
            | Operation::AllGather
            | Operation::Broadcast { .. }
            | Operation::Send { .. }
            | Operation::Receive { .. } => Ok(blocks),
            other => Err(CollectiveError::refused(
                self.rank,
                other.name(),
                "expected all-gather, broadcast, a transfer, a barrier or a split through a \
                 folder, which carries what ranks say and no gradients; use the communicator that \
                 was made on it",
            )),
        }
    }

    fn make(&mut self, call: Call<'_>, blocks: Blocks<'_>) -> Result<(), CollectiveError> {
        let (rank, shape) = (self.rank, call.shape());
        let movement = Movement {
            operation: call.operation,
            blocks: &blocks.all_bytes(call.dtype.len_bytes()),
        };
        let share = movement.share(rank, call.buffers);
        let (print, parties) = self.begin(&shape, blocks.numel);
        let all = self.exchange(&print, &parties, &share.shown)?;
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
                return Err(self.failed(&print, reason));
            }
            pull.into.copy_from_slice(found);
        }
        Ok(())
    }

    fn join(&mut self, membership: Option<Membership>) -> Result<Option<Self>, CollectiveError> {
        let (print, parties) = self.begin(&CallShape::SPLIT, 0);
        let own = membership.map(|own| own.to_word().to_le_bytes());
        let all = self.exchange(&print, &parties, own.as_ref().map_or(&[], |own| own))?;
        let Some(own) = membership else {
            return Ok(None);
        };
        let members = own.members(self.world_size, |rank| {
            let word = u64::from_le_bytes(all[rank].as_slice().try_into().ok()?);
            Some(Membership::from_word(word))
        });
        let place = members.iter().position(|&rank| rank == self.rank);
        let folder = self.files.folder.join(format!("group-{}-{}", print.sequence, own.colour));
        let made = std::fs::create_dir_all(&folder);
        made.map_err(|error| self.failed(&print, error))?;
        let place = place.expect("this rank's own membership is among all");
        let files = Files::new(folder, place, self.files.chain());
        Ok(Some(Self::new(files, members.len(), self.timeout)))
    }

    fn end<T>(&mut self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        let outcome = outcome.map_err(|error| self.files.close(error));
        self.recorder.end(outcome.as_ref().map(|_| ()));
        outcome
    }
}

impl Communicator for FolderControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn execute(&mut self, call: Call<'_>) -> Result<(), CollectiveError> {
        // A call that cannot be made was not begun, and is not the recorder's last one.
        let blocks = self.check(&call).map_err(|error| self.files.close(error))?;
        let outcome = self.make(call, blocks);
        self.end(outcome)
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        let outcome = self.join(membership);
        let joined = self.end(outcome)?;
        Ok(joined.map(|group| Box::new(group) as Box<dyn Communicator>))
    }

    fn set_context(&mut self, context: CallContext) {
        self.context = context;
    }

    fn aborter(&self) -> Aborter {
        let world_size = self.world_size;
        let close = |files: &Files, error| drop(files.close(error));
        Aborter::of(self.rank, &self.files, close, move |files| files.closing(0..world_size))
    }

    fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.files.closing(0..self.world_size)
    }
}

impl Drop for FolderControl {
    fn drop(&mut self) {
        let (rank, calls) = (self.rank, self.recorder.calls_begun());
        if std::thread::panicking() {
            self.files.close(CollectiveError::Panicked { rank, calls });
        }
        self.files.leave(self.world_size, calls);
    }
}
