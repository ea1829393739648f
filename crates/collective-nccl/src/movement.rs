//! Operations as transfers between device buffers.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{CollectiveError, Fingerprint, Movement, Operation};

use crate::cut;
use crate::gpus::Gpus;
use crate::library::BYTES;
use crate::link::Message;
use crate::memory::Memory;

/// Starts transfers and waits until NCCL has enqueued them.
pub(crate) fn transfers(
    comm: &mut Gpus,
    messages: &[Message],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    comm.engine(print, |link| link.transfers(messages))?;
    comm.settle(print)
}

fn others(comm: &Gpus) -> impl Iterator<Item = usize> + use<> {
    let own = comm.rank();
    (0..comm.world_size()).filter(move |&rank| rank != own)
}

pub(crate) fn broadcast(
    comm: &mut Gpus,
    memory: Memory,
    root: usize,
    len_bytes: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    if len_bytes == 0 {
        return Ok(());
    }
    // Only the root has input, and NCCL reads no other rank's.
    let from = if comm.rank() == root { memory.input(0) } else { memory.result(0) };
    comm.engine(print, |link| {
        // SAFETY: both lead to `len_bytes` bytes of device memory that the call holds until its
        // mark was reached.
        link.group(|nccl, comm, stream| unsafe {
            let (from, to) = (from as *const _, memory.result(0) as *mut _);
            (nccl.broadcast)(from, to, len_bytes, BYTES, root as c_int, comm, stream)
        })
    })?;
    comm.settle(print)
}

/// Brings all blocks to all ranks: by NCCL's own all-gather if blocks are equal, else by transfers.
pub(crate) fn all_gather(
    comm: &mut Gpus,
    memory: Memory,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let own = ranges[comm.rank()].clone();
    let from = memory.input_block(&own);
    if own.is_empty() && ranges.iter().all(|range| range.is_empty()) {
        return Ok(());
    }
    if cut::are_a_row(ranges) {
        let first = ranges[0].start;
        comm.engine(print, |link| {
            // SAFETY: as in `broadcast`; blocks are equal and in a row, so the result is as
            // long as all of them.
            link.group(|nccl, comm, stream| unsafe {
                let (from, to) = (from as *const _, memory.result(first) as *mut _);
                (nccl.all_gather)(from, to, own.len(), BYTES, comm, stream)
            })
        })?;
        return comm.settle(print);
    }
    by_messages(comm, memory, Operation::AllGather, ranges, print)
}

/// Moves blocks unchanged from rank to rank.
pub(crate) fn by_messages(
    comm: &mut Gpus,
    memory: Memory,
    operation: Operation,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let rank = comm.rank();
    let movement = Movement { operation, blocks: ranges };
    let shown = memory.input_block(&movement.shown(rank));
    let mut messages = Vec::with_capacity(2 * ranges.len());
    for take in movement.takes(rank) {
        let into = match operation {
            Operation::Scatter { .. } => memory.result_block(&ranges[rank]),
            _ => memory.result(take.target),
        };
        let len_bytes = take.range.len();
        if take.from == rank {
            let from = shown + take.range.start as u64;
            comm.engine(print, |link| link.copy(from, into, len_bytes))?;
        } else {
            messages.push(Message::into(take.from, into, len_bytes));
        }
    }
    for to in others(comm) {
        if let Some(range) = movement.given(rank, to) {
            let from = shown + range.start as u64;
            messages.push(Message::out(to, from, range.len()));
        }
    }
    transfers(comm, &messages, print)
}

pub(crate) fn all_to_all(
    comm: &mut Gpus,
    memory: Memory,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let Memory::Same(base) = memory else {
        return by_messages(comm, memory, Operation::AllToAll, ranges, print);
    };
    // In place, arriving blocks would overwrite blocks that have not left yet.
    let received = &comm.link.workspace.received;
    let (received, step) = (received.address, cut::step(received.len_bytes(), ranges.len()));
    for start in cut::starts(ranges, step) {
        let parts = cut::parts(ranges, start, step);
        let blocks: Vec<_> = cut::packed(&parts)
            .into_iter()
            .zip(parts)
            .map(|(place, part)| (received + place.start as u64, part))
            .collect();
        comm.engine(print, |link| {
            blocks
                .iter()
                .try_for_each(|(copy, part)| link.copy(base + part.start as u64, *copy, part.len()))
        })?;
        let mut messages = Vec::with_capacity(2 * blocks.len());
        for peer in others(comm) {
            let (address, range) = &blocks[peer];
            messages.push(Message::out(peer, *address, range.len()));
            messages.push(Message::into(peer, base + range.start as u64, range.len()));
        }
        let (address, own) = &blocks[comm.rank()];
        comm.engine(print, |link| link.copy(*address, base + own.start as u64, own.len()))?;
        transfers(comm, &messages, print)?;
    }
    Ok(())
}
