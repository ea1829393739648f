//! The collectives that move elements as they are: every block goes straight from its rank to where
//! it belongs.

use fusestep_collective::{Blocks, Buffers, Call, CollectiveError, Fingerprint, Movement, Share};

use crate::communicator::MpiCommunicator;
use crate::engine::Kind;
use crate::exchange::Message;
use crate::{exchange, reduction};

/// The data of a call that all ranks have agreed on.
pub(crate) fn move_data(
    comm: &mut MpiCommunicator,
    call: Call<'_>,
    blocks: Blocks<'_>,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    if let Some(op) = call.operation.reduce_op() {
        return reduction::reduce(comm, call, blocks, op, print);
    }
    let blocks = &blocks.all_bytes(call.dtype.len_bytes());
    let movement = Movement { operation: call.operation, blocks };
    carry_out(comm, &movement, call.buffers, (Kind::Data, print));
    Ok(())
}

/// Moves what a movement says, in messages of this kind.
pub(crate) fn carry_out(
    comm: &mut MpiCommunicator,
    movement: &Movement<'_>,
    buffers: Buffers<'_>,
    (kind, print): (Kind, &Fingerprint),
) {
    let rank = comm.group.rank;
    let Share { shown, pulls } = movement.share(rank, buffers);
    let mut messages: Vec<Message<'_>> = Vec::new();
    for pull in pulls {
        if pull.from == rank {
            pull.into.copy_from_slice(&shown[pull.range]);
        } else {
            messages.push(Message::into(pull.from, kind, pull.into));
        }
    }
    for to in comm.group.others() {
        if let Some(range) = movement.given(rank, to) {
            messages.push(Message::out(to, kind, &shown[range]));
        }
    }
    exchange::messages(comm, messages, print);
}
