//! The collectives that reduce: blocks are exchanged pairwise, each rank reduces its own in rank
//! order where they lie, results go where they belong.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{CollectiveError, Communicator, Fingerprint, Operation, ReduceOp};

use crate::Reduction;
use crate::communicator::{Memory, NcclCommunicator};
use crate::device::DeviceBuffer;
use crate::driver::Address;
use crate::kernel::{PACK_BYTES, Parts};
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
        // Slots begin where packs do, so that whole packs are read from them.
        let slot_bytes = own.len().next_multiple_of(PACK_BYTES);
        let slots = self.scratch(slot_bytes * ranges.len(), print)?;
        let slot = |of: usize| slots + (of * slot_bytes) as u64;
        self.exchange_blocks(memory, ranges, slot, print)?;
        let result = match print.operation {
            Operation::ReduceScatter(_) => memory.result_block(&own),
            Operation::AllReduce(_) => memory.result(own.start),
            // Only the root has room for results; the others' leave from scratch memory.
            Operation::Reduce { root, .. } if root == rank => memory.result(own.start),
            _ => slot(rank),
        };
        // Memory that a caller has brought may lie between elements, where the kernel cannot read.
        let element_bytes = print.dtype.len_bytes() as u64;
        let or_slot = |address: Address| {
            if address.is_multiple_of(element_bytes) {
                address
            } else {
                slot(rank)
            }
        };
        let input = memory.input(own.start);
        let parts = Parts {
            own: or_slot(input),
            slots,
            slot_bytes,
            result: or_slot(result),
            len_bytes: own.len(),
            ranks: ranges.len(),
            own_rank: rank,
        };
        // All of it in the order of the stream: the host waits for nothing here.
        self.engine(print, |link| {
            link.copy(input, parts.own, own.len())?;
            link.reduce(&parts, print.dtype, op)?;
            link.copy(parts.result, result, own.len())
        })?;
        match print.operation {
            Operation::AllReduce(_) => {
                self.all_gather(Memory::Same(memory.result(0)), ranges, print)?;
            }
            Operation::Reduce { root, .. } => {
                // As if apart: what this rank has is one block, and the root's own lies in its
                // place already.
                let memory = if rank == root {
                    Memory::Same(memory.result(0))
                } else {
                    Memory::Two {
                        send: result,
                        receive: result,
                    }
                };
                self.gather(memory, root, ranges, print)?;
            }
            _ => {}
        }
        self.finish(print)
    }

    /// Sends each rank its block and receives what the others have of this rank's, each in its
    /// slot.
    fn exchange_blocks(
        &mut self,
        memory: Memory,
        ranges: &[Range<usize>],
        slot: impl Fn(usize) -> Address,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank();
        let mut pieces = Vec::with_capacity(2 * ranges.len());
        for peer in (0..ranges.len()).filter(|&peer| peer != rank) {
            pieces.push(Piece::Out {
                to: peer,
                address: memory.input(ranges[peer].start),
                len_bytes: ranges[peer].len(),
            });
            pieces.push(Piece::In {
                from: peer,
                address: slot(peer),
                len_bytes: ranges[rank].len(),
            });
        }
        self.transfers(&pieces, print)
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
            // Who is not the root of a reduce may have no room for a result; NCCL writes none
            // there.
            self.engine(print, |link| {
                link.group(|nccl, comm, stream| {
                    let (from, to) = (from as *const _, to as *mut _);
                    // SAFETY: both lead to `numel` elements of device memory that the call holds
                    // until its mark was reached; a result is written on the
                    // root only, where it was checked.
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
