//! What ranks say to each other before data moves, or when it does not.

use fusestep_collective::{
    CallShape, CollectiveError, Collectives, Communicator, Fingerprint, Operation,
};

use crate::communicator::NcclCommunicator;

/// Bytes of a frame, what a rank says at a time: why it speaks, in a word of its own, and a call.
const FRAME_BYTES: usize = REASON_BYTES + Fingerprint::WIRE_BYTES;

const REASON_BYTES: usize = 8;

/// Why a rank speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It is about to make the call.
    Begins = 0,
    /// The data of the call, its last one, has not come through.
    IsStuck = 1,
}

/// Counts a call, tells the others what it is and hears what theirs are.
pub(crate) fn announce(
    comm: &mut NcclCommunicator,
    shape: &CallShape<'_>,
    numel: usize,
) -> Result<Fingerprint, CollectiveError> {
    let rank = comm.rank();
    let pair = shape.operation.pair(rank);
    let sequence = match pair {
        Some(pair) => comm.made.entry(pair).or_insert(0),
        None => &mut comm.sequence,
    };
    *sequence += 1;
    let mut print = shape.fingerprint(numel, *sequence, comm.context);
    comm.recorder.begin(&print);
    comm.last = Some(print);
    let named = print;
    if let Some((_, to)) = pair {
        print.operation = Operation::Send { to };
    }
    exchange(comm, &print, Reason::Begins, pair)?;
    Ok(named)
}

/// Exchanges frames with all ranks or with the other side of a transfer, and judges them.
fn exchange(
    comm: &mut NcclCommunicator,
    own: &Fingerprint,
    reason: Reason,
    pair: Option<(usize, usize)>,
) -> Result<(), CollectiveError> {
    let mut bytes = [0; FRAME_BYTES];
    bytes[0] = reason as u8;
    bytes[REASON_BYTES..].copy_from_slice(&own.to_bytes());
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (mut all, ranks) = match pair {
        None => (vec![0; FRAME_BYTES * world_size], (0..world_size).collect()),
        Some((from, to)) => (vec![0; FRAME_BYTES * 2], vec![from, to]),
    };
    match pair {
        None => comm.control.all_gather(&bytes, &mut all)?,
        // Both sides speak, the sender first.
        Some((from, to)) => {
            let (first, second) = all.split_at_mut(FRAME_BYTES);
            if rank == from {
                first.copy_from_slice(&bytes);
                comm.control.send(&bytes, to)?;
                comm.control.receive(second, to)?;
            } else {
                second.copy_from_slice(&bytes);
                comm.control.receive(first, from)?;
                comm.control.send(&bytes, from)?;
            }
        }
    }
    let frames = all.chunks_exact(FRAME_BYTES);
    let prints = own.read_all(rank, frames.clone().map(|frame| &frame[REASON_BYTES..]))?;
    if let Some(place) = frames.clone().position(|frame| frame[0] == Reason::IsStuck as u8) {
        let Fingerprint { operation, sequence, .. } = prints[place];
        let timeout_ms = comm.options.timeout.as_millis();
        let reason = format!(
            "data of call {sequence} not through after {timeout_ms} ms, though every rank has come"
        );
        return Err(CollectiveError::engine(ranks[place], operation.name(), reason));
    }
    let compared = Fingerprint::compare(prints.len(), |index| &prints[index]);
    compared.map_err(|error| error.with_ranks(&ranks))
}

/// Why data is not through: whoever does not say so is the one that stopped.
pub(crate) fn stuck(comm: &mut NcclCommunicator, print: &Fingerprint) -> CollectiveError {
    let pair = print.operation.pair(comm.rank());
    match exchange(comm, print, Reason::IsStuck, pair) {
        Err(error) => error,
        Ok(()) => unreachable!("this rank's own frame says that it is stuck"),
    }
}

/// An error of the control communicator, said of the call that it was for.
pub(crate) fn renamed(mut error: CollectiveError, print: Option<&Fingerprint>) -> CollectiveError {
    if let CollectiveError::Late { operation, sequence, bucket, .. } = &mut error
        && let Some(print) = print
    {
        (*operation, *sequence) = (print.operation.name(), print.sequence);
        *bucket = print.context.bucket;
    }
    error
}
