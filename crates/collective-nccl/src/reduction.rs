//! The collectives that reduce: blocks are exchanged pairwise, each rank reduces its own in rank
//! order where they lie, results go where they belong.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{CollectiveError, Communicator, Fingerprint, Operation, ReduceOp};

use crate::communicator::NcclCommunicator;
use crate::cut;
use crate::device_call::Memory;
use crate::driver::Address;
use crate::kernel::{PACK_BYTES, Parts};
use crate::library::names;
use crate::link::Message;
use crate::{Reduction, movement};

/// Whether the operation is left to NCCL.
pub(crate) fn is_engines_own(comm: &NcclCommunicator, op: ReduceOp, print: &Fingerprint) -> bool {
    let has = matches!(print.operation, Operation::AllReduce(_) | Operation::Reduce { .. });
    has && comm.options.reduction == Reduction::Engine && names(print.dtype, op).is_some()
}

/// A reduction in rank order. What the others contribute passes through the communicator's own
/// memory, in segments if there is more of it; an element's sum is the same whichever segment it is
/// in.
pub(crate) fn reduce(
    comm: &mut NcclCommunicator,
    memory: Memory,
    ranges: &[Range<usize>],
    op: ReduceOp,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let step = cut::step(comm.link.workspace.received.len_bytes(), ranges.len());
    for start in cut::starts(ranges, step) {
        let parts = cut::parts(ranges, start, step);
        let results = reduce_parts(comm, memory, ranges, &parts, op, print)?;
        if let Operation::Reduce { root, .. } = print.operation {
            movement::by_messages(comm, results, Operation::Gather { root }, &parts, print)?;
        }
    }
    if let Operation::AllReduce(_) = print.operation {
        movement::all_gather(comm, Memory::Same(memory.result(0)), ranges, print)?;
    }
    Ok(())
}

/// Reduces this rank's part of a segment; where the root of a reduce gathers results from.
fn reduce_parts(
    comm: &mut NcclCommunicator,
    memory: Memory,
    ranges: &[Range<usize>],
    parts: &[Range<usize>],
    op: ReduceOp,
    print: &Fingerprint,
) -> Result<Memory, CollectiveError> {
    let rank = comm.rank();
    let own = parts[rank].clone();
    let received = comm.link.workspace.received.address;
    // Each rank's elements begin where a pack does, so that whole packs are read.
    let stride_bytes = own.len().next_multiple_of(PACK_BYTES);
    let place_of = |of: usize| received + (of * stride_bytes) as u64;
    exchange_blocks(comm, memory, parts, place_of, print)?;
    let result = match print.operation {
        Operation::ReduceScatter(_) => {
            memory.result_block(&ranges[rank]) + (own.start - ranges[rank].start) as u64
        }
        Operation::AllReduce(_) => memory.result(own.start),
        // Only the root has room for results; the others' leave from the communicator's memory.
        Operation::Reduce { root, .. } if root == rank => memory.result(own.start),
        _ => place_of(rank),
    };
    // Memory that a caller has brought may lie between elements, where the kernel cannot read.
    let element_bytes = print.dtype.len_bytes() as u64;
    let or_received = |address: Address| {
        if address.is_multiple_of(element_bytes) { address } else { place_of(rank) }
    };
    let input = memory.input(own.start);
    let kernel = Parts {
        own: or_received(input),
        received,
        stride_bytes,
        result: or_received(result),
        len_bytes: own.len(),
        ranks: parts.len(),
        own_rank: rank,
    };
    // All of it in the order of the stream: the host waits for nothing here.
    comm.engine(print, |link| {
        link.copy(input, kernel.own, own.len())?;
        link.reduce(&kernel, print.dtype, op)?;
        link.copy(kernel.result, result, own.len())
    })?;
    Ok(match print.operation {
        // What another rank than the root has is one block, as if apart; the root's own lies in
        // its place already.
        Operation::Reduce { root, .. } if root != rank => {
            Memory::Two { send: result, receive: result }
        }
        _ => Memory::Same(memory.result(0)),
    })
}

/// Sends each rank its block and receives what the others have of this rank's, each where
/// `place_of` says.
fn exchange_blocks(
    comm: &mut NcclCommunicator,
    memory: Memory,
    ranges: &[Range<usize>],
    place_of: impl Fn(usize) -> Address,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let rank = comm.rank();
    let mut messages = Vec::with_capacity(2 * ranges.len());
    for peer in (0..ranges.len()).filter(|&peer| peer != rank) {
        let theirs = &ranges[peer];
        messages.push(Message::out(peer, memory.input(theirs.start), theirs.len()));
        messages.push(Message::into(peer, place_of(peer), ranges[rank].len()));
    }
    movement::transfers(comm, &messages, print)
}

/// NCCL's own all-reduce or reduce of `len_bytes`, which it has.
pub(crate) fn by_engine(
    comm: &mut NcclCommunicator,
    memory: Memory,
    op: ReduceOp,
    len_bytes: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let numel = len_bytes / print.dtype.len_bytes();
    let (Some((dtype, op)), 1..) = (names(print.dtype, op), numel) else {
        return Ok(());
    };
    let (from, to) = (memory.input(0), memory.result(0));
    // Who is not the root of a reduce may have no room for a result; NCCL writes none there.
    comm.engine(print, |link| {
        link.group(|nccl, comm, stream| {
            let (from, to) = (from as *const _, to as *mut _);
            // SAFETY: both lead to `numel` elements of device memory that the call holds until
            // its mark was reached; a result is written on the root only, where it was checked.
            unsafe {
                match print.operation {
                    Operation::Reduce { root, .. } => {
                        (nccl.reduce)(from, to, numel, dtype, op, root as c_int, comm, stream)
                    }
                    _ => (nccl.all_reduce)(from, to, numel, dtype, op, comm, stream),
                }
            }
        })
    })?;
    comm.settle(print)
}
