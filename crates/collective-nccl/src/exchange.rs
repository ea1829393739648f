//! What ranks say to each other before data moves, or when it does not.

use fusestep_collective::{
    CallShape, CollectiveError, Collectives, Communicator, Fingerprint, Operation,
};

use crate::communicator::NcclCommunicator;
use crate::wire::{FRAME_BYTES, Frame};

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
    exchange(comm, Frame::Call(print), pair)?;
    Ok(named)
}

/// Exchanges frames with all ranks or with the other side of a transfer, and judges them.
fn exchange(
    comm: &mut NcclCommunicator,
    own: Frame,
    pair: Option<(usize, usize)>,
) -> Result<(), CollectiveError> {
    let bytes = own.to_bytes();
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
    let frames: Option<Vec<Frame>> = all.chunks_exact(FRAME_BYTES).map(Frame::from_bytes).collect();
    let frames = frames.ok_or_else(|| CollectiveError::Engine {
        rank,
        operation: own.fingerprint().operation.name(),
        reason: "frames of another version of this program; run the same one on all ranks"
            .to_owned(),
    })?;
    let stuck = frames.iter().position(|frame| matches!(frame, Frame::Stuck(_)));
    if let Some(place) = stuck {
        return Err(CollectiveError::Engine {
            rank: ranks[place],
            operation: frames[place].fingerprint().operation.name(),
            reason: format!(
                "data of call {} not through after {} ms, though every rank has come",
                frames[place].fingerprint().sequence,
                comm.options.timeout.as_millis()
            ),
        });
    }
    let compared = Fingerprint::compare(frames.len(), |index| frames[index].fingerprint());
    compared.map_err(|error| error.with_ranks(&ranks))
}

/// Why data is not through: whoever does not say so is the one that stopped.
pub(crate) fn stuck(comm: &mut NcclCommunicator, print: &Fingerprint) -> CollectiveError {
    let pair = match print.operation {
        Operation::Send { to } => Some((comm.rank(), to)),
        Operation::Receive { from } => Some((from, comm.rank())),
        _ => None,
    };
    match exchange(comm, Frame::Stuck(*print), pair) {
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
