//! From one rank to another.

use fusestep_collective::{Buffers, Call, CollectiveError, Fingerprint, Operation};

use crate::communicator::MpiCommunicator;
use crate::engine::Kind;
use crate::exchange;
use crate::exchange::Message;
use crate::meeting::Party;
use crate::wire::Header;

/// Both sides compare what they do; then the elements go.
pub(crate) fn between(
    comm: &mut MpiCommunicator,
    call: Call<'_>,
    print: Fingerprint,
    pair: (usize, usize),
) -> Result<(), CollectiveError> {
    let sends = matches!(call.operation, Operation::Send { .. });
    let peer = if sends { pair.1 } else { pair.0 };
    let own = comm.group.rank;
    let met = comm.meet(Party::Pair(peer), Header::of(print));
    if let Err(error) = met {
        return Err(error.with_ranks(&[own.min(peer), own.max(peer)]));
    }
    let message = match call.buffers {
        Buffers::InPlace(buffer) if sends => Message::out(peer, Kind::Transfer, buffer),
        Buffers::InPlace(buffer) => Message::into(peer, Kind::Transfer, buffer),
        Buffers::OutOfPlace { send, .. } if sends => Message::out(peer, Kind::Transfer, send),
        Buffers::OutOfPlace { receive, .. } => Message::into(peer, Kind::Transfer, receive),
    };
    exchange::messages(comm, [message], &print);
    Ok(())
}
