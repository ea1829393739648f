//! Operations as transfers between device buffers.

use std::ffi::c_int;
use std::ops::Range;

use fusestep_collective::{Blocks, CollectiveError, Communicator, Fingerprint, Operation};

use crate::communicator::NcclCommunicator;
use crate::cut;
use crate::device_call::Memory;
use crate::driver::Address;
use crate::library::BYTES;
use crate::link::Piece;

impl NcclCommunicator {
    /// Where the blocks of ranks begin and end, in bytes of the whole.
    pub(crate) fn ranges(&self, blocks: Blocks<'_>, print: &Fingerprint) -> Vec<Range<usize>> {
        let element_bytes = print.dtype.len_bytes();
        (0..self.world_size())
            .map(|rank| blocks.of_bytes(rank, element_bytes))
            .collect()
    }

    /// Enqueues what moves the data of a call that all ranks make, or of a piece of it. Operations
    /// of blocks look at `ranges`, which need not follow each other; others at `whole`, their
    /// length in bytes.
    pub(crate) fn move_data(
        &mut self,
        memory: Memory,
        ranges: &[Range<usize>],
        whole: usize,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
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
                if self.is_engines_own(op, print) {
                    self.engines_own(memory, op, whole, print)?;
                } else {
                    self.reduction(memory, ranges, op, print)?;
                }
            }
            Operation::Broadcast { root } => self.broadcast(memory, root, whole, print)?,
            Operation::AllGather => self.all_gather(memory, ranges, print)?,
            Operation::Scatter { root } => self.scatter(memory, root, ranges, print)?,
            Operation::Gather { root } => self.gather(memory, root, ranges, print)?,
            Operation::AllToAll => self.all_to_all(memory, ranges, print)?,
            Operation::Send { to } => self.transfers(&[out(to, memory.input(0), whole)], print)?,
            Operation::Receive { from } => {
                self.transfers(&[into(from, memory.result(0), whole)], print)?;
            }
            Operation::Barrier | Operation::Split | Operation::ReduceUpdate => {}
        }
        Ok(())
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
        if cut::are_a_row(ranges) {
            let first = ranges[0].start;
            self.engine(print, |link| {
                // SAFETY: as in `broadcast`; blocks are equal and in a row, so the result is as
                // long as all of them.
                link.group(|nccl, comm, stream| unsafe {
                    let (from, to) = (from as *const _, memory.result(first) as *mut _);
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
        let base = match memory {
            Memory::Two { send, .. } => {
                let blocks: Vec<_> = ranges
                    .iter()
                    .map(|range| (send + range.start as u64, range.clone()))
                    .collect();
                return self.deal(&blocks, memory, print);
            }
            Memory::Same(base) => base,
        };
        // In place, what arrives would overwrite what has not left yet.
        let slots = &self.link.workspace.slots;
        let (slots, step) = (slots.address, cut::step(slots.len_bytes(), ranges.len()));
        for start in cut::starts(ranges, step) {
            let parts = cut::parts(ranges, start, step);
            let blocks: Vec<_> = cut::packed(&parts)
                .into_iter()
                .zip(parts)
                .map(|(place, part)| (slots + place.start as u64, part))
                .collect();
            self.engine(print, |link| {
                blocks.iter().try_for_each(|(copy, part)| {
                    link.copy(base + part.start as u64, *copy, part.len())
                })
            })?;
            self.deal(&blocks, memory, print)?;
        }
        Ok(())
    }

    /// Sends each rank its block, which lies at an address of its own, and receives the others'
    /// into the ranges of the result.
    fn deal(
        &mut self,
        blocks: &[(Address, Range<usize>)],
        memory: Memory,
        print: &Fingerprint,
    ) -> Result<(), CollectiveError> {
        let mut pieces = Vec::with_capacity(2 * blocks.len());
        for peer in self.others() {
            let (address, range) = &blocks[peer];
            pieces.push(Piece::Out {
                to: peer,
                address: *address,
                len_bytes: range.len(),
            });
            pieces.push(Piece::In {
                from: peer,
                address: memory.result(range.start),
                len_bytes: range.len(),
            });
        }
        let (address, own) = &blocks[self.rank()];
        self.engine(print, |link| {
            link.copy(*address, memory.result(own.start), own.len())
        })?;
        self.transfers(&pieces, print)
    }
}
