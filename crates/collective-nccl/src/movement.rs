//! Operations as transfers between device buffers.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{Blocks, CollectiveError, Communicator, Fingerprint, Operation};

use crate::communicator::NcclCommunicator;
use crate::device_call::Memory;
use crate::driver::Address;
use crate::library::BYTES;
use crate::link::Message;
use crate::{cut, reduction};

/// Where the blocks of ranks begin and end, in bytes of the whole.
pub(crate) fn ranges(
    comm: &NcclCommunicator,
    blocks: Blocks<'_>,
    print: &Fingerprint,
) -> Vec<Range<usize>> {
    let element_bytes = print.dtype.len_bytes();
    (0..comm.world_size())
        .map(|rank| blocks.of_bytes(rank, element_bytes))
        .collect()
}

/// Enqueues what moves the data of a call that all ranks make, or of a segment of it. Operations
/// of blocks look at `ranges`, which need not follow each other; others at `whole`, their
/// length in bytes.
pub(crate) fn move_data(
    comm: &mut NcclCommunicator,
    memory: Memory,
    ranges: &[Range<usize>],
    whole: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let out = |to: usize, address: Address, len_bytes: usize| Message::Out {
        to,
        address,
        len_bytes,
    };
    let into = |from: usize, address: Address, len_bytes: usize| Message::In {
        from,
        address,
        len_bytes,
    };
    match print.operation {
        Operation::AllReduce(op)
        | Operation::Reduce { reduce: op, .. }
        | Operation::ReduceScatter(op) => {
            if reduction::is_engines_own(comm, op, print) {
                reduction::by_engine(comm, memory, op, whole, print)?;
            } else {
                reduction::reduce(comm, memory, ranges, op, print)?;
            }
        }
        Operation::Broadcast { root } => broadcast(comm, memory, root, whole, print)?,
        Operation::AllGather => all_gather(comm, memory, ranges, print)?,
        Operation::Scatter { root } => scatter(comm, memory, root, ranges, print)?,
        Operation::Gather { root } => gather(comm, memory, root, ranges, print)?,
        Operation::AllToAll => all_to_all(comm, memory, ranges, print)?,
        Operation::Send { to } => transfers(comm, &[out(to, memory.input(0), whole)], print)?,
        Operation::Receive { from } => {
            transfers(comm, &[into(from, memory.result(0), whole)], print)?;
        }
        Operation::Barrier | Operation::Split | Operation::ReduceUpdate => {}
    }
    Ok(())
}

/// Starts transfers and waits until NCCL takes more.
pub(crate) fn transfers(
    comm: &mut NcclCommunicator,
    messages: &[Message],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    comm.engine(print, |link| link.transfers(messages))?;
    comm.settle(print)
}

fn others(comm: &NcclCommunicator) -> impl Iterator<Item = usize> + use<> {
    let own = comm.rank();
    (0..comm.world_size()).filter(move |&rank| rank != own)
}

fn broadcast(
    comm: &mut NcclCommunicator,
    memory: Memory,
    root: usize,
    len_bytes: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    if len_bytes == 0 {
        return Ok(());
    }
    // Who is not the root has no input, and NCCL looks at none.
    let from = if comm.rank() == root {
        memory.input(0)
    } else {
        memory.result(0)
    };
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

/// All blocks to everyone: NCCL's own ring where they are equal, transfers where not.
pub(crate) fn all_gather(
    comm: &mut NcclCommunicator,
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
    let mut messages = Vec::with_capacity(2 * ranges.len());
    for peer in others(comm) {
        messages.push(Message::Out {
            to: peer,
            address: from,
            len_bytes: own.len(),
        });
        messages.push(Message::In {
            from: peer,
            address: memory.result(ranges[peer].start),
            len_bytes: ranges[peer].len(),
        });
    }
    comm.engine(print, |link| {
        link.copy(from, memory.result(own.start), own.len())
    })?;
    transfers(comm, &messages, print)
}

fn scatter(
    comm: &mut NcclCommunicator,
    memory: Memory,
    root: usize,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let own = ranges[comm.rank()].clone();
    if comm.rank() != root {
        let message = Message::In {
            from: root,
            address: memory.result_block(&own),
            len_bytes: own.len(),
        };
        return transfers(comm, &[message], print);
    }
    let message = |to: usize| Message::Out {
        to,
        address: memory.input(ranges[to].start),
        len_bytes: ranges[to].len(),
    };
    let messages: Vec<Message> = others(comm).map(message).collect();
    comm.engine(print, |link| {
        link.copy(
            memory.input(own.start),
            memory.result_block(&own),
            own.len(),
        )
    })?;
    transfers(comm, &messages, print)
}

/// All blocks to the root.
pub(crate) fn gather(
    comm: &mut NcclCommunicator,
    memory: Memory,
    root: usize,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let own = ranges[comm.rank()].clone();
    if comm.rank() != root {
        let message = Message::Out {
            to: root,
            address: memory.input_block(&own),
            len_bytes: own.len(),
        };
        return transfers(comm, &[message], print);
    }
    let message = |from: usize| Message::In {
        from,
        address: memory.result(ranges[from].start),
        len_bytes: ranges[from].len(),
    };
    let messages: Vec<Message> = others(comm).map(message).collect();
    comm.engine(print, |link| {
        link.copy(
            memory.input_block(&own),
            memory.result(own.start),
            own.len(),
        )
    })?;
    transfers(comm, &messages, print)
}

fn all_to_all(
    comm: &mut NcclCommunicator,
    memory: Memory,
    ranges: &[Range<usize>],
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let base = match memory {
        Memory::Two { send, .. } => {
            let blocks: Vec<_> = ranges
                .iter()
                .map(|range| (send + range.start as u64, range.clone()))
                .collect();
            return deal(comm, &blocks, memory, print);
        }
        Memory::Same(base) => base,
    };
    // In place, what arrives would overwrite what has not left yet.
    let received = &comm.link.workspace.received;
    let (received, step) = (
        received.address,
        cut::step(received.len_bytes(), ranges.len()),
    );
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
        deal(comm, &blocks, memory, print)?;
    }
    Ok(())
}

/// Sends each rank its block, which lies at an address of its own, and receives the others'
/// into the ranges of the result.
fn deal(
    comm: &mut NcclCommunicator,
    blocks: &[(Address, Range<usize>)],
    memory: Memory,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let mut messages = Vec::with_capacity(2 * blocks.len());
    for peer in others(comm) {
        let (address, range) = &blocks[peer];
        messages.push(Message::Out {
            to: peer,
            address: *address,
            len_bytes: range.len(),
        });
        messages.push(Message::In {
            from: peer,
            address: memory.result(range.start),
            len_bytes: range.len(),
        });
    }
    let (address, own) = &blocks[comm.rank()];
    comm.engine(print, |link| {
        link.copy(*address, memory.result(own.start), own.len())
    })?;
    transfers(comm, &messages, print)
}
