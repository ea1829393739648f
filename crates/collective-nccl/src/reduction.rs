//! The collectives that reduce: blocks are exchanged pairwise, each rank reduces its own in rank order, results go where they belong.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{
    CollectiveError, Communicator, Fingerprint, Operation, ReduceOp, reduce_slices,
};

use crate::Reduction;
use crate::communicator::{Memory, NcclCommunicator};
use crate::device::DeviceBuffer;
use crate::driver::Address;
use crate::library::names;
use crate::link::Piece;

impl NcclCommunicator {
    pub(crate) fn reduction(
        &mut self,
        memory: Memory,
        ranges: &[Range<usize>],
        op: ReduceOp,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        if self.options.reduction == Reduction::Engine && self.engines_own(memory, op, print)? {
            return self.finish(print);
        }
        let rank = self.rank();
        let own = ranges[rank].clone();
        let slot = own.len();
        let incoming = self.scratch(slot * ranges.len(), print)?;
        let mut pieces = Vec::with_capacity(2 * ranges.len());
        for peer in (0..ranges.len()).filter(|&peer| peer != rank) {
            pieces.push(Piece::Out {
                to: peer,
                address: memory.input(ranges[peer].start),
                len_bytes: ranges[peer].len(),
            });
            pieces.push(Piece::In {
                from: peer,
                address: incoming + (peer * slot) as u64,
                len_bytes: slot,
            });
        }
        self.engine(print, |link| {
            link.copy(
                memory.input(own.start),
                incoming + (rank * slot) as u64,
                slot,
            )
        })?;
        self.transfers(&pieces, print)?;
        let result = match print.operation {
            Operation::ReduceScatter(_) => memory.result_block(&own),
            Operation::AllReduce(_) => memory.result(own.start),
            // Only the root has room for results; the others' leave from scratch memory.
            Operation::Reduce { root, .. } if root == rank => memory.result(own.start),
            _ => incoming,
        };
        self.reduce_blocks(slot, ranges.len(), op, print)?;
        self.keep(result, incoming, slot, print)?;
        match print.operation {
            Operation::AllReduce(_) => {
                self.all_gather(Memory::Same(memory.result(0)), ranges, print)?;
            }
            Operation::Reduce { root, .. } => {
                // As if apart: what this rank has is one block, and the root's own lies in its place already.
                let memory = match rank == root {
                    true => Memory::Same(memory.result(0)),
                    false => Memory::Two {
                        send: result,
                        receive: result,
                    },
                };
                self.gather(memory, root, ranges, print)?;
            }
            _ => {}
        }
        self.finish(print)
    }

    /// Reduces the slots of the scratch memory into its first one, in rank order.
    fn reduce_blocks(
        &mut self,
        slot: usize,
        slots: usize,
        op: ReduceOp,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        if slot == 0 {
            return Ok(());
        }
        // The data must be there before the host reads it: that wait has the deadline, the copy has none.
        self.finish(print)?;
        let words = (slot * (slots + 1)).div_ceil(8);
        if self.host.len() < words {
            self.host.resize(words, 0);
        }
        let mut host = std::mem::take(&mut self.host);
        let bytes: &mut [u8] = as_bytes(&mut host);
        let (inputs, rest) = bytes.split_at_mut(slot * slots);
        let result = &mut rest[..slot];
        let scratch = self.scratch.take();
        let level = self.options.level;
        let outcome = self.engine(print, |link| {
            let scratch = scratch.as_ref().ok_or("no scratch memory")?;
            scratch.get(0, inputs, link.stream)?;
            let slices: Vec<&[u8]> = inputs.chunks_exact(slot).collect();
            reduce_slices(level, print.dtype, op, &slices, result);
            scratch.put(0, result, link.stream)
        });
        (self.host, self.scratch) = (host, scratch);
        outcome
    }

    /// Puts the result where it belongs.
    fn keep(
        &mut self,
        place: Address,
        result: Address,
        len_bytes: usize,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        self.engine(print, |link| link.copy(result, place, len_bytes))
    }

    /// NCCL's own all-reduce or reduce; says whether it has one.
    fn engines_own(
        &mut self,
        memory: Memory,
        op: ReduceOp,
        print: &Fingerprint,
    ) -> Result<bool, CollectiveError> {
        let Some((dtype, op)) = names(print.dtype, op) else {
            return Ok(false);
        };
        // The length fits: it was checked against memory.
        let numel = print.numel as usize;
        if numel == 0 {
            return Ok(true);
        }
        let (from, to) = (memory.input(0), memory.result(0));
        let operation = print.operation;
        let has = matches!(
            operation,
            Operation::AllReduce(_) | Operation::Reduce { .. }
        );
        if has {
            // Who is not the root of a reduce may have no room for a result; NCCL writes none there.
            self.engine(print, |link| {
                link.group(|nccl, comm, stream| {
                    let (from, to) = (from as *const _, to as *mut _);
                    // SAFETY: both lead to `numel` elements of device memory that the call holds until its mark was reached; a
                    // result is written on the root only, where it was checked.
                    unsafe {
                        match operation {
                            Operation::Reduce { root, .. } => (nccl.reduce)(
                                from,
                                to,
                                numel,
                                dtype,
                                op,
                                root as c_int,
                                comm,
                                stream,
                            ),
                            _ => (nccl.all_reduce)(from, to, numel, dtype, op, comm, stream),
                        }
                    }
                })
            })?;
            self.settle(print)?;
        }
        Ok(has)
    }

    /// Device memory for as many bytes, kept from call to call.
    pub(crate) fn scratch(
        &mut self,
        len_bytes: usize,
        print: &Fingerprint,
    ) -> Result<Address, CollectiveError> {
        let kept = self.scratch.take();
        let kept = kept.filter(|kept| kept.len_bytes() >= len_bytes);
        let buffer = match kept {
            Some(kept) => kept,
            None => self.engine(print, |link| {
                DeviceBuffer::allocate(&link.device, len_bytes)
            })?,
        };
        Ok(self.scratch.insert(buffer).address)
    }
}

/// Words as bytes.
fn as_bytes(words: &mut [u64]) -> &mut [u8] {
    let len_bytes = size_of_val(words);
    // SAFETY: the same memory; every byte of a word is a byte, and any bytes make a word.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len_bytes) }
}
