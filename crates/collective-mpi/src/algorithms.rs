//! Collectives that move elements unchanged: every block goes straight from its rank to the ranks
//! that receive it.

use fusestep_collective::{Blocks, Buffers, Call, CollectiveError, Fingerprint, Movement, Share};

use crate::by_messages::ByMessages;
use crate::exchange::Message;
use crate::library::Kind;
use crate::{exchange, reduction};

/// Moves the data of a call on which all ranks have agreed.
pub(crate) fn move_data(
    comm: &mut ByMessages,
    call: Call<'_>,
    blocks: Blocks<'_>,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    if let Some(op) = call.operation.reduce_op() {
        return reduction::reduce(comm, call, blocks, op, print);
    }
    let blocks = &blocks.all_bytes(call.dtype.len_bytes());
    let movement = Movement { operation: call.operation, blocks };
    carry_out(comm, &movement, call.buffers, Kind::Data, print);
    Ok(())
}

/// Moves the blocks of a movement, in messages of this kind.
pub(crate) fn carry_out(
    comm: &mut ByMessages,
    movement: &Movement<'_>,
    buffers: Buffers<'_>,
    kind: Kind,
    print: &Fingerprint,
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
