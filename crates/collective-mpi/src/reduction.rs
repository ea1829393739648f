//! Collectives that reduce: ranks exchange blocks pairwise, each rank reduces its own block in rank
//! order, and results go to the ranks that receive them.

use std::ops::Range;

use fusestep_collective::{
    Blocks, Buffers, Call, CollectiveError, Fingerprint, OfRanks, Receivers, ReduceOp,
    reduce_slices,
};

use crate::by_messages::ByMessages;
use crate::exchange::Message;
use crate::library::Kind;
use crate::{exchange, native};

/// Parts, segments and receivers of one reduction.
struct Task<'a> {
    /// The part of each rank, in bytes.
    parts: OfRanks<Range<usize>>,
    /// Bytes of each part that are under way at a time; a multiple of an element.
    segment: usize,
    receivers: Receivers,
    op: ReduceOp,
    print: &'a Fingerprint,
}

/// Memory of a reduction's input and results.
enum Memory<'a> {
    Same(&'a mut [u8]),
    /// Input and results in two buffers. The results have the whole length, or the own part's with
    /// [`Receivers::Owner`], or are empty if this rank gets none.
    Two(&'a [u8], &'a mut [u8]),
}

impl Task<'_> {
    /// Segment `index` of a rank's part.
    fn segment(&self, rank: usize, index: usize) -> Range<usize> {
        let part = &self.parts[rank];
        let start = part.end.min(part.start + index * self.segment);
        start..part.end.min(start + self.segment)
    }

    fn segments(&self) -> usize {
        let longest = self.parts.iter().map(|part| part.len()).max();
        longest.unwrap_or(0).div_ceil(self.segment)
    }

    fn gets_results(&self, rank: usize) -> bool {
        match self.receivers {
            Receivers::All => true,
            Receivers::Rank(root) => rank == root,
            Receivers::Owner => false,
        }
    }
}

pub(crate) fn reduce(
    comm: &mut ByMessages,
    call: Call<'_>,
    blocks: Blocks<'_>,
    op: ReduceOp,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let element_bytes = call.dtype.len_bytes();
    let ByMessages { native, group, begun_ns, .. } = comm;
    let buffers = match native::all_reduce(native.as_ref(), group, *begun_ns, call, op)? {
        None => return Ok(()),
        Some(buffers) => buffers,
    };
    let segment = comm.group.options.segment_bytes.max(1).next_multiple_of(element_bytes);
    let (rank, world_size) = (comm.group.rank, comm.group.world_size());
    let task = Task {
        parts: blocks.all_bytes(element_bytes),
        segment,
        receivers: Receivers::of_operation(print.operation),
        op,
        print,
    };
    let mut memory = match buffers {
        Buffers::InPlace(buffer) => Memory::Same(buffer),
        Buffers::OutOfPlace { send, receive } => match task.receivers {
            Receivers::Rank(root) if root != rank => Memory::Two(send, &mut []),
            _ => Memory::Two(send, receive),
        },
    };
    let stride = segment.next_multiple_of(64).min(task.longest_stride());
    let (mut incoming, mut reduced) =
        (std::mem::take(&mut comm.incoming), std::mem::take(&mut comm.reduced));
    grow(&mut incoming, stride * world_size);
    grow(&mut reduced, stride);
    {
        let mut incoming = Incoming { bytes: bytemuck::cast_slice_mut(&mut incoming), stride };
        let reduced = bytemuck::cast_slice_mut(&mut reduced);
        // One round more than there are segments: the results of the last one still have to go.
        for round in 0..=task.segments() {
            one_round(comm, &task, &mut memory, &mut incoming, reduced, round);
        }
    }
    (comm.incoming, comm.reduced) = (incoming, reduced);
    Ok(())
}

/// Contributions of other ranks to a segment of this rank's part.
struct Incoming<'a> {
    bytes: &'a mut [u8],
    /// Bytes from one rank's contribution to the next one's.
    stride: usize,
}

impl Incoming<'_> {
    /// The contribution of rank `from`, of this length.
    fn of(&self, from: usize, len: usize) -> &[u8] {
        &self.bytes[from * self.stride..][..len]
    }
}

/// Exchanges segment `round` of all parts and the results of the segment before, then reduces.
fn one_round(
    comm: &mut ByMessages,
    task: &Task<'_>,
    memory: &mut Memory<'_>,
    incoming: &mut Incoming<'_>,
    reduced: &mut [u8],
    round: usize,
) {
    let (rank, world_size) = (comm.group.rank, comm.group.world_size());
    let before = |of: usize| match round.checked_sub(1) {
        Some(round) if task.gets_results(rank) => task.segment(of, round),
        _ => task.parts[of].start..task.parts[of].start,
    };
    // Two ranges for each rank: results that arrive, then input that leaves.
    let ranges: Vec<Range<usize>> =
        (0..world_size).flat_map(|of| [before(of), task.segment(of, round)]).collect();
    let (arriving, leaving) = memory.parts(&ranges, task.gets_results(rank));
    let own = leaving[rank].len();
    let mut messages: Vec<Message<'_>> = Vec::with_capacity(4 * world_size);
    for (from, bytes) in
        incoming.bytes.chunks_mut(incoming.stride.max(1)).take(world_size).enumerate()
    {
        if from != rank {
            messages.push(Message::into(from, Kind::Data, &mut bytes[..own]));
        }
    }
    for (from, bytes) in arriving.into_iter().enumerate() {
        if from != rank {
            messages.push(Message::into(from, Kind::Result, bytes));
        }
    }
    let result = round.checked_sub(1).map_or(0, |round| task.segment(rank, round).len());
    for to in comm.group.others() {
        messages.push(Message::out(to, Kind::Data, leaving[to]));
        if task.gets_results(to) {
            messages.push(Message::out(to, Kind::Result, &reduced[..result]));
        }
    }
    exchange::messages(comm, messages, task.print);
    let inputs: Vec<&[u8]> = (0..world_size)
        .map(|from| if from == rank { leaving[rank] } else { incoming.of(from, own) })
        .collect();
    let level = comm.group.options.level;
    reduce_slices(level, task.print.dtype, task.op, &inputs, &mut reduced[..own]);
    memory.keep(task, rank, round, &reduced[..own]);
}

impl Memory<'_> {
    /// Slices that arrive and slices that leave, from pairs of ranges. None arrive if this rank
    /// gets no results.
    fn parts(
        &mut self,
        ranges: &[Range<usize>],
        gets_results: bool,
    ) -> (Vec<&mut [u8]>, Vec<&[u8]>) {
        match self {
            Memory::Same(buffer) => {
                let mut parts = carve(buffer, ranges).into_iter();
                let mut both = (Vec::new(), Vec::new());
                while let (Some(arrives), Some(leaves)) = (parts.next(), parts.next()) {
                    both.0.push(arrives);
                    both.1.push(&*leaves);
                }
                both
            }
            Memory::Two(send, receive) => {
                let results: Vec<_> = ranges.iter().step_by(2).cloned().collect();
                let arriving = if gets_results { carve(receive, &results) } else { Vec::new() };
                let inputs = ranges.iter().skip(1).step_by(2);
                (arriving, inputs.map(|range| &send[range.clone()]).collect())
            }
        }
    }

    /// Copies this rank's reduced segment to its own results, if this rank keeps them.
    fn keep(&mut self, task: &Task<'_>, rank: usize, round: usize, result: &[u8]) {
        let place = task.segment(rank, round);
        let within = place.start - task.parts[rank].start..place.end - task.parts[rank].start;
        let kept = task.gets_results(rank) || task.receivers == Receivers::Owner;
        match self {
            Memory::Same(buffer) if kept => buffer[place].copy_from_slice(result),
            Memory::Two(_, receive) if task.receivers == Receivers::Owner => {
                receive[within].copy_from_slice(result);
            }
            Memory::Two(_, receive) if kept => receive[place].copy_from_slice(result),
            _ => {}
        }
    }
}

impl Task<'_> {
    /// Bytes of the longest part, in whole cache lines.
    fn longest_stride(&self) -> usize {
        let longest = self.parts.iter().map(|part| part.len()).max();
        longest.unwrap_or(0).next_multiple_of(64)
    }
}

fn grow(words: &mut Vec<u64>, len_bytes: usize) {
    if words.len() * 8 < len_bytes {
        words.resize(len_bytes.div_ceil(8), 0);
    }
}

/// The parts of a buffer at ranges that ascend and do not overlap.
fn carve<'a>(buffer: &'a mut [u8], ranges: &[Range<usize>]) -> Vec<&'a mut [u8]> {
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
