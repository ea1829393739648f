//! Exchange of frames between ranks, before data moves or when data is stuck.

use std::time::Duration;

use fusestep_collective::{CollectiveError, Collectives, Communicator, Fingerprint, Pair};

/// Bytes of a frame, a rank's message to others: the reason in a word of its own, and the call's
/// fingerprint.
const FRAME_BYTES: usize = REASON_BYTES + Fingerprint::WIRE_BYTES;

const REASON_BYTES: usize = 8;

/// Reason for which a rank sends a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The rank is about to make the call.
    Begins = 0,
    /// The data of the call, the rank's last one, has not come through.
    IsStuck = 1,
}

/// Exchanges the fingerprint of a call with the other ranks.
pub(crate) fn announce(
    control: &mut dyn Communicator,
    print: &Fingerprint,
    pair: Option<Pair>,
    timeout: Duration,
) -> Result<(), CollectiveError> {
    exchange(control, print, Reason::Begins, pair, timeout)
}

/// Exchanges frames with all ranks or with the peer of a transfer, and checks them.
fn exchange(
    control: &mut dyn Communicator,
    own: &Fingerprint,
    reason: Reason,
    pair: Option<Pair>,
    timeout: Duration,
) -> Result<(), CollectiveError> {
    let mut bytes = [0; FRAME_BYTES];
    bytes[0] = reason as u8;
    bytes[REASON_BYTES..].copy_from_slice(&own.to_bytes());
    let (rank, world_size) = (control.rank(), control.world_size());
    let (mut all, ranks) = match pair {
        None => (vec![0; FRAME_BYTES * world_size], (0..world_size).collect()),
        Some(pair) => (vec![0; FRAME_BYTES * 2], pair.ranks().to_vec()),
    };
    match pair {
        None => control.all_gather(&bytes, &mut all)?,
        // Both sides send a frame, the sender of the data first.
        Some(Pair { sender, receiver }) => {
            let (first, second) = all.split_at_mut(FRAME_BYTES);
            if rank == sender {
                first.copy_from_slice(&bytes);
                control.send(&bytes, receiver)?;
                control.receive(second, receiver)?;
            } else {
                second.copy_from_slice(&bytes);
                control.receive(first, sender)?;
                control.send(&bytes, sender)?;
            }
        }
    }
    let frames = all.chunks_exact(FRAME_BYTES);
    let prints = own.read_all(rank, frames.clone().map(|frame| &frame[REASON_BYTES..]))?;
    if let Some(place) = frames.clone().position(|frame| frame[0] == Reason::IsStuck as u8) {
        let Fingerprint { operation, sequence, .. } = prints[place];
        let timeout_ms = timeout.as_millis();
        let reason = format!(
            "data of call {sequence} not through after {timeout_ms} ms, though every rank has come"
        );
        return Err(CollectiveError::engine(ranks[place], operation.name(), reason));
    }
    let compared = Fingerprint::compare(prints.len(), |index| &prints[index]);
    compared.map_err(|error| error.with_ranks(&ranks))
}

/// The error of data that is not through. A rank that sends no frame here is the rank that has
/// stopped.
pub(crate) fn stuck(
    control: &mut dyn Communicator,
    print: &Fingerprint,
    timeout: Duration,
) -> CollectiveError {
    let pair = print.operation.pair(control.rank());
    match exchange(control, print, Reason::IsStuck, pair, timeout) {
        Err(error) => error,
        Ok(()) => unreachable!("this rank's own frame says that it is stuck"),
    }
}
