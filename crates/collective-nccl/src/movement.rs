//! Operations as transfers between device buffers.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{Blocks, CollectiveError, Communicator, Fingerprint, Operation};

use crate::communicator::{Memory, NcclCommunicator};
use crate::driver::Address;
use crate::library::BYTES;
use crate::link::Piece;

impl Memory {
    /// Input at an offset of the whole.
    pub(crate) fn input(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { send: base, .. }) = self;
        base + start as u64
    }

    /// The result at an offset of the whole.
    pub(crate) fn result(self, start: usize) -> Address {
        let (Memory::Same(base) | Memory::Two { receive: base, .. }) = self;
        base + start as u64
    }

    /// The own block as input, which apart is all of it.
    pub(crate) fn input_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { send, .. } => send,
        }
    }

    /// The own block as result, which apart is all of it.
    pub(crate) fn result_block(self, block: &Range<usize>) -> Address {
        match self {
            Memory::Same(base) => base + block.start as u64,
            Memory::Two { receive, .. } => receive,
        }
    }
}

impl NcclCommunicator {
    /// Moves the data of a call that all ranks make, and returns when it is there.
    pub(crate) fn move_data(
        &mut self,
        memory: Memory,
        blocks: Blocks<'_>,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let element_bytes = print.dtype.len_bytes();
        let ranges: Vec<Range<usize>> = (0..self.world_size())
            .map(|rank| blocks.of_bytes(rank, element_bytes))
            .collect();
        let whole = blocks.numel * element_bytes;
        let out = |to: usize, address: Address, len_bytes: usize| Piece::Out {
            to,
            address,
            len_bytes,
        };
        let into = |from: usize, address: Address, len_bytes: usize| Piece::In {
            from,
            address,
            len_bytes,
        };
        match print.operation {
            Operation::AllReduce(op)
            | Operation::Reduce { reduce: op, .. }
            | Operation::ReduceScatter(op) => {
                return self.reduction(memory, &ranges, op, print);
            }
            Operation::Broadcast { root } => self.broadcast(memory, root, whole, print)?,
            Operation::AllGather => self.all_gather(memory, &ranges, print)?,
            Operation::Scatter { root } => self.scatter(memory, root, &ranges, print)?,
            Operation::Gather { root } => self.gather(memory, root, &ranges, print)?,
            Operation::AllToAll => self.all_to_all(memory, &ranges, print)?,
            Operation::Send { to } => self.transfers(&[out(to, memory.input(0), whole)], print)?,
            Operation::Receive { from } => {
                self.transfers(&[into(from, memory.result(0), whole)], print)?;
            }
            Operation::Barrier | Operation::Split | Operation::ReduceUpdate => {}
        }
        self.finish(print)
    }

    /// Starts transfers and waits until NCCL takes more.
    pub(crate) fn transfers(
        &mut self,
        pieces: &[Piece],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        self.engine(print, |link| link.transfers(pieces))?;
        self.settle(print)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank();
        (0..self.world_size()).filter(move |&rank| rank != own)
    }

    fn broadcast(
        &mut self,
        memory: Memory,
        root: usize,
        len_bytes: usize,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        if len_bytes == 0 {
            return Ok(());
        }
        // Who is not the root has no input, and NCCL looks at none.
        let from = if self.rank() == root {
            memory.input(0)
        } else {
            memory.result(0)
        };
        self.engine(print, |link| {
            // SAFETY: both lead to `len_bytes` bytes of device memory that the call holds until its
            // mark was reached.
            link.group(|nccl, comm, stream| unsafe {
                let (from, to) = (from as *const _, memory.result(0) as *mut _);
                (nccl.broadcast)(from, to, len_bytes, BYTES, root as c_int, comm, stream)
            })
        })?;
        self.settle(print)
    }

    /// All blocks to everyone: NCCL's own ring where they are equal, transfers where not.
    pub(crate) fn all_gather(
        &mut self,
        memory: Memory,
        ranges: &[Range<usize>],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let own = ranges[self.rank()].clone();
        let from = memory.input_block(&own);
        if own.is_empty() && ranges.iter().all(|range| range.is_empty()) {
            return Ok(());
        }
        if ranges.iter().all(|range| range.len() == own.len()) {
            self.engine(print, |link| {
                // SAFETY: as in `broadcast`; blocks are equal, so the result is as long as all of
                // them.
                link.group(|nccl, comm, stream| unsafe {
                    let (from, to) = (from as *const _, memory.result(0) as *mut _);
                    (nccl.all_gather)(from, to, own.len(), BYTES, comm, stream)
                })
            })?;
            return self.settle(print);
        }
        let mut pieces = Vec::with_capacity(2 * ranges.len());
        for peer in self.others() {
            pieces.push(Piece::Out {
                to: peer,
                address: from,
                len_bytes: own.len(),
            });
            pieces.push(Piece::In {
                from: peer,
                address: memory.result(ranges[peer].start),
                len_bytes: ranges[peer].len(),
            });
        }
        self.engine(print, |link| {
            link.copy(from, memory.result(own.start), own.len())
        })?;
        self.transfers(&pieces, print)
    }

    fn scatter(
        &mut self,
        memory: Memory,
        root: usize,
        ranges: &[Range<usize>],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let own = ranges[self.rank()].clone();
        if self.rank() != root {
            let piece = Piece::In {
                from: root,
                address: memory.result_block(&own),
                len_bytes: own.len(),
            };
            return self.transfers(&[piece], print);
        }
        let piece = |to: usize| Piece::Out {
            to,
            address: memory.input(ranges[to].start),
            len_bytes: ranges[to].len(),
        };
        let pieces: Vec<Piece> = self.others().map(piece).collect();
        self.engine(print, |link| {
            link.copy(
                memory.input(own.start),
                memory.result_block(&own),
                own.len(),
            )
        })?;
        self.transfers(&pieces, print)
    }

    /// All blocks to the root.
    pub(crate) fn gather(
        &mut self,
        memory: Memory,
        root: usize,
        ranges: &[Range<usize>],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let own = ranges[self.rank()].clone();
        if self.rank() != root {
            let piece = Piece::Out {
                to: root,
                address: memory.input_block(&own),
                len_bytes: own.len(),
            };
            return self.transfers(&[piece], print);
        }
        let piece = |from: usize| Piece::In {
            from,
            address: memory.result(ranges[from].start),
            len_bytes: ranges[from].len(),
        };
        let pieces: Vec<Piece> = self.others().map(piece).collect();
        self.engine(print, |link| {
            link.copy(
                memory.input_block(&own),
                memory.result(own.start),
                own.len(),
            )
        })?;
        self.transfers(&pieces, print)
    }

    fn all_to_all(
        &mut self,
        memory: Memory,
        ranges: &[Range<usize>],
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let own = ranges[self.rank()].clone();
        let whole = ranges.last().map_or(0, |range| range.end);
        // In place, what arrives would overwrite what has not left yet.
        let from = match memory {
            Memory::Two { send, .. } => send,
            Memory::Same(base) => {
                let copy = self.scratch(whole, print)?;
                self.engine(print, |link| link.copy(base, copy, whole))?;
                copy
            }
        };
        let at = |range: &Range<usize>| from + range.start as u64;
        let mut pieces = Vec::with_capacity(2 * ranges.len());
        for peer in self.others() {
            pieces.push(Piece::Out {
                to: peer,
                address: at(&ranges[peer]),
                len_bytes: ranges[peer].len(),
            });
            pieces.push(Piece::In {
                from: peer,
                address: memory.result(ranges[peer].start),
                len_bytes: ranges[peer].len(),
            });
        }
        self.engine(print, |link| {
            link.copy(at(&own), memory.result(own.start), own.len())
        })?;
        self.transfers(&pieces, print)
    }
}
