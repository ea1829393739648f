//! The collectives that move elements as they are: every block goes straight from its rank to where
//! it belongs.

use std::ops::Range;

use fusestep_collective::{Blocks, Buffers, Call, CollectiveError, Fingerprint, Operation};

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
    let element_bytes = call.dtype.len_bytes();
    let world_size = comm.group.world_size();
    let ranges = || -> Vec<Range<usize>> {
        (0..world_size)
            .map(|rank| blocks.of_bytes(rank, element_bytes))
            .collect()
    };
    match call.operation {
        Operation::AllReduce(op)
        | Operation::Reduce { reduce: op, .. }
        | Operation::ReduceScatter(op) => return reduction::reduce(comm, call, blocks, op, print),
        Operation::Broadcast { root } => broadcast(comm, call.buffers, root, print),
        Operation::AllGather => all_gather(comm, call.buffers, &ranges(), print),
        Operation::Scatter { root } => scatter(comm, call.buffers, root, &ranges(), print),
        Operation::Gather { root } => gather(comm, call.buffers, root, &ranges(), print),
        Operation::AllToAll => all_to_all(comm, call.buffers, &ranges(), print),
        Operation::Barrier
        | Operation::Split
        | Operation::ReduceUpdate
        | Operation::Send { .. }
        | Operation::Receive { .. } => {}
    }
    Ok(())
}

fn broadcast(comm: &mut MpiCommunicator, buffers: Buffers<'_>, root: usize, print: &Fingerprint) {
    let is_root = comm.group.rank == root;
    let others = comm.group.others();
    match buffers {
        Buffers::InPlace(buffer) if is_root => {
            let buffer = &*buffer;
            exchange::messages(
                comm,
                others.map(|to| Message::out(to, Kind::Data, buffer)),
                print,
            );
        }
        Buffers::OutOfPlace { send, receive } if is_root => {
            receive.copy_from_slice(send);
            exchange::messages(
                comm,
                others.map(|to| Message::out(to, Kind::Data, send)),
                print,
            );
        }
        Buffers::InPlace(receive) | Buffers::OutOfPlace { receive, .. } => {
            exchange::messages(comm, [Message::into(root, Kind::Data, receive)], print);
        }
    }
}

fn all_gather(
    comm: &mut MpiCommunicator,
    buffers: Buffers<'_>,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) {
    let (rank, others) = (comm.group.rank, comm.group.others());
    let (own, mut parts) = match buffers {
        Buffers::OutOfPlace { send, receive } => {
            receive[ranges[rank].clone()].copy_from_slice(send);
            (send, carve(receive, ranges))
        }
        Buffers::InPlace(buffer) => {
            let mut parts = carve(buffer, ranges);
            let own = std::mem::take(&mut parts[rank]);
            (&*own, parts)
        }
    };
    let mut messages: Vec<Message<'_>> = Vec::new();
    for (from, part) in parts.drain(..).enumerate() {
        if from != rank {
            messages.push(Message::into(from, Kind::Data, part));
        }
    }
    messages.extend(others.map(|to| Message::out(to, Kind::Data, own)));
    exchange::messages(comm, messages, print);
}

fn scatter(
    comm: &mut MpiCommunicator,
    buffers: Buffers<'_>,
    root: usize,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) {
    let (rank, others) = (comm.group.rank, comm.group.others());
    let own = ranges[rank].clone();
    let send = match buffers {
        Buffers::InPlace(buffer) if rank == root => &*buffer,
        Buffers::OutOfPlace { send, receive } if rank == root => {
            receive.copy_from_slice(&send[own]);
            send
        }
        Buffers::InPlace(buffer) => {
            return exchange::messages(
                comm,
                [Message::into(root, Kind::Data, &mut buffer[own])],
                print,
            );
        }
        Buffers::OutOfPlace { receive, .. } => {
            return exchange::messages(comm, [Message::into(root, Kind::Data, receive)], print);
        }
    };
    let message = |to: usize| Message::out(to, Kind::Data, &send[ranges[to].clone()]);
    exchange::messages(comm, others.map(message), print);
}

fn gather(
    comm: &mut MpiCommunicator,
    buffers: Buffers<'_>,
    root: usize,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) {
    let rank = comm.group.rank;
    let own = ranges[rank].clone();
    let receive = match buffers {
        Buffers::InPlace(buffer) if rank == root => buffer,
        Buffers::OutOfPlace { send, receive } if rank == root => {
            receive[own].copy_from_slice(send);
            receive
        }
        Buffers::InPlace(buffer) => {
            return exchange::messages(comm, [Message::out(root, Kind::Data, &buffer[own])], print);
        }
        Buffers::OutOfPlace { send, .. } => {
            return exchange::messages(comm, [Message::out(root, Kind::Data, send)], print);
        }
    };
    let parts = carve(receive, ranges).into_iter().enumerate();
    let messages = parts.filter(|(from, _)| *from != rank);
    let messages = messages.map(|(from, part)| Message::into(from, Kind::Data, part));
    exchange::messages(comm, messages, print);
}

fn all_to_all(
    comm: &mut MpiCommunicator,
    buffers: Buffers<'_>,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) {
    let (rank, others) = (comm.group.rank, comm.group.others());
    let own = ranges[rank].clone();
    // In place, what arrives would overwrite what has not left yet.
    let copy;
    let (send, receive) = match buffers {
        Buffers::OutOfPlace { send, receive } => (send, receive),
        Buffers::InPlace(buffer) => {
            copy = buffer.to_vec();
            (&copy[..], buffer)
        }
    };
    receive[own.clone()].copy_from_slice(&send[own]);
    let mut messages: Vec<Message<'_>> = Vec::new();
    for (from, part) in carve(receive, ranges).into_iter().enumerate() {
        if from != rank {
            messages.push(Message::into(from, Kind::Data, part));
        }
    }
    messages.extend(others.map(|to| Message::out(to, Kind::Data, &send[ranges[to].clone()])));
    exchange::messages(comm, messages, print);
}

/// The parts of a buffer at ranges that ascend and do not overlap.
pub(crate) fn carve<'a>(buffer: &'a mut [u8], ranges: &[Range<usize>]) -> Vec<&'a mut [u8]> {
    let (mut rest, mut at) = (buffer, 0);
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (_, behind) = rest.split_at_mut(range.start - at);
        let (part, behind) = behind.split_at_mut(range.len());
        parts.push(part);
        (rest, at) = (behind, range.end);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_their_ranges() {
        let mut buffer: Vec<u8> = (0..10).collect();
        let parts = carve(&mut buffer, &[0..0, 1..3, 3..3, 3..7, 9..10]);
        let expected: [&[u8]; 5] = [&[], &[1, 2], &[], &[3, 4, 5, 6], &[9]];
        assert_eq!(parts, expected);
    }
}
