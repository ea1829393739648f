//! Collectives that reduce: ranks exchange blocks pairwise, each rank reduces its own block in rank
//! order on its GPU, and results go to the ranks that receive them.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{CollectiveError, Fingerprint, Operation, ReduceOp};

use crate::cut;
use crate::driver::Address;
use crate::gpus::Gpus;
use crate::kernel::{PACK_BYTES, Parts};
use crate::library::names;
use crate::link::Message;
use crate::memory::Memory;
use crate::{Reduction, movement};

/// Whether the operation is left to NCCL.
pub(crate) fn is_engines_own(comm: &Gpus, op: ReduceOp, print: &Fingerprint) -> bool {
    let has = matches!(print.operation, Operation::AllReduce(_) | Operation::Reduce { .. });
    has && comm.options.reduction == Reduction::Engine && names(print.dtype, op).is_some()
}

/// Reduces in rank order. Other ranks' contributions pass through the communicator's own memory, in
/// segments if there is more of them. Segments change no sum.
pub(crate) fn reduce(
    comm: &mut Gpus,
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

/// Reduces this rank's part of a segment; returns the memory from which the root of a reduce
/// gathers results.
fn reduce_parts(
    comm: &mut Gpus,
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
        // Only the root has room for results. Other ranks' results leave from the communicator's
        // memory.
        Operation::Reduce { root, .. } if root == rank => memory.result(own.start),
        _ => place_of(rank),
    };
    // Memory of a caller may not be aligned to elements, and the kernel cannot read it then.
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
        // A rank other than the root sends one block from memory of its own. The root's block lies
        // in its place already.
        Operation::Reduce { root, .. } if root != rank => {
            Memory::Two { send: result, receive: result }
        }
        _ => Memory::Same(memory.result(0)),
    })
}

/// Sends each rank its block, and receives the others' elements of this rank's block at the
/// addresses of `place_of`.
fn exchange_blocks(
    comm: &mut Gpus,
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

/// Makes an all-reduce or reduce of `len_bytes` by NCCL's own.
pub(crate) fn by_engine(
    comm: &mut Gpus,
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
    // Only the root of a reduce must have room for a result; NCCL writes none on other ranks.
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
