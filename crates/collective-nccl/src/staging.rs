//! Calls on host buffers, which go through device memory, in segments if they are longer.

use std::ops::Range;

use fusestep_collective::{Blocks, Buffers, CollectiveError, Fingerprint, Operation, Part};

use crate::gpus::Gpus;
use crate::memory::Memory;
use crate::{cut, data, reduction};

/// A segment of a call: ranges of the whole, and their places on the device.
struct Segment {
    of_whole: Vec<Range<usize>>,
    on_device: Vec<Range<usize>>,
    /// Bytes of the segment, for operations without blocks.
    len_bytes: usize,
}

/// Copies input to the device, makes the call there, in place, and copies the result back.
pub(crate) fn through_the_device(
    comm: &mut Gpus,
    buffers: &mut Buffers<'_>,
    blocks: Blocks<'_>,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let ranges = blocks.all_bytes(print.dtype.len_bytes()).into_vec();
    let own_start = ranges[comm.rank()].start;
    let len_bytes = blocks.numel * print.dtype.len_bytes();
    let room = comm.link.workspace.staging.len_bytes();
    if len_bytes <= room {
        let segment = Segment { of_whole: ranges.clone(), on_device: ranges, len_bytes };
        return move_segment(comm, buffers, &segment, own_start, print);
    }
    if is_of_blocks(comm, print) {
        let step = cut::step(room, ranges.len());
        for start in cut::starts(&ranges, step) {
            let parts = cut::parts(&ranges, start, step);
            let segment = Segment { on_device: cut::packed(&parts), of_whole: parts, len_bytes: 0 };
            move_segment(comm, buffers, &segment, own_start, print)?;
        }
        return Ok(());
    }
    let step = cut::step(room, 1);
    for start in (0..len_bytes).step_by(step) {
        let part = start..len_bytes.min(start + step);
        let of_whole = vec![part];
        let segment = Segment {
            on_device: cut::packed(&of_whole),
            len_bytes: cut::longest(&of_whole),
            of_whole,
        };
        move_segment(comm, buffers, &segment, 0, print)?;
    }
    Ok(())
}

/// Whether an operation treats the blocks of ranks differently, so that a segment has a part of
/// each.
fn is_of_blocks(comm: &Gpus, print: &Fingerprint) -> bool {
    match print.operation {
        Operation::Broadcast { .. } | Operation::Send { .. } | Operation::Receive { .. } => false,
        operation => match operation.reduce_op() {
            Some(op) => !reduction::is_engines_own(comm, op, print),
            None => true,
        },
    }
}

fn move_segment(
    comm: &mut Gpus,
    buffers: &mut Buffers<'_>,
    segment: &Segment,
    own_start: usize,
    print: &Fingerprint,
) -> Result<(), CollectiveError> {
    let rank = comm.rank();
    let [given, gotten] = print.operation.parts(rank);
    // Out of place, a buffer may hold the own block alone.
    let (send, send_start) = match buffers {
        Buffers::InPlace(buffer) => (&**buffer, 0),
        Buffers::OutOfPlace { send, .. } => (*send, start_of(given, own_start)),
    };
    let runs = segment.runs(given, rank);
    comm.engine(print, |link| {
        let staging = &link.workspace.staging;
        runs.iter().try_for_each(|(range, place)| {
            let bytes = &send[range.start - send_start..range.end - send_start];
            staging.put(*place, bytes, link.stream)
        })
    })?;
    let memory = Memory::Same(comm.link.workspace.staging.address);
    data::move_data(comm, memory, &segment.on_device, segment.len_bytes, print)?;
    comm.finish(print)?;
    let (receive, receive_start) = match buffers {
        Buffers::InPlace(buffer) => (&mut **buffer, 0),
        Buffers::OutOfPlace { receive, .. } => (&mut **receive, start_of(gotten, own_start)),
    };
    let runs = segment.runs(gotten, rank);
    comm.engine(print, |link| {
        let staging = &link.workspace.staging;
        runs.iter().try_for_each(|(range, place)| {
            let bytes = &mut receive[range.start - receive_start..range.end - receive_start];
            staging.get(*place, bytes, link.stream)
        })
    })
}

impl Segment {
    /// The ranges of a part with their places. Ranges that follow each other on both sides are
    /// joined.
    fn runs(&self, part: Part, rank: usize) -> Vec<(Range<usize>, usize)> {
        let pairs = match part {
            Part::Whole => 0..self.of_whole.len(),
            Part::Own => rank..rank + 1,
            Part::Nothing => 0..0,
        };
        let mut runs: Vec<(Range<usize>, usize)> = Vec::with_capacity(pairs.len());
        for index in pairs {
            let (range, place) = (&self.of_whole[index], self.on_device[index].start);
            match runs.last_mut() {
                Some((last, at)) if last.end == range.start && *at + last.len() == place => {
                    last.end = range.end;
                }
                _ => runs.push((range.clone(), place)),
            }
        }
        runs
    }
}

fn start_of(part: Part, own_start: usize) -> usize {
    match part {
        Part::Own => own_start,
        Part::Whole | Part::Nothing => 0,
    }
}
