//! Segments of calls that are longer than the memory that a communicator keeps.

use std::ops::Range;

/// Bytes of whose multiples segments begin within each block, so that packs of elements stay whole.
pub(crate) const GRAIN: usize = 256;

/// Bytes of each of `ranks` blocks that memory of `room` bytes takes at a time.
pub(crate) fn step(room: usize, ranks: usize) -> usize {
    (room / ranks / GRAIN * GRAIN).max(GRAIN)
}

/// Parts of one segment, one for each block. They are equally long, except where blocks end.
pub(crate) fn parts(blocks: &[Range<usize>], start: usize, step: usize) -> Vec<Range<usize>> {
    let part = |block: &Range<usize>| {
        let at = |offset: usize| block.end.min(block.start + offset);
        at(start)..at(start + step)
    };
    blocks.iter().map(part).collect()
}

/// Offsets within each block at which segments begin, as many as the longest block needs.
pub(crate) fn starts(blocks: &[Range<usize>], step: usize) -> impl Iterator<Item = usize> + use<> {
    (0..longest(blocks)).step_by(step)
}

pub(crate) fn longest(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(0)
}

/// Places for parts from 0 on, each at a multiple of the longest part's length. Parts of one length
/// lie in a row.
pub(crate) fn packed(parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let longest = longest(parts);
    let place = |(rank, part): (usize, &Range<usize>)| rank * longest..rank * longest + part.len();
    parts.iter().enumerate().map(place).collect()
}

/// Whether ranges of one length follow each other.
pub(crate) fn are_a_row(ranges: &[Range<usize>]) -> bool {
    ranges.windows(2).all(|two| two[0].end == two[1].start && two[0].len() == two[1].len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_every_block_once_and_fit_the_room() {
        for (room, lens) in [
            (1024, vec![1000, 1000, 996]),
            (4096, vec![0, 9000, 3]),
            (1, vec![700]),
            (512, vec![0, 0]),
            (768, vec![256, 512, 511]),
        ] {
            let mut end = 0;
            let blocks: Vec<Range<usize>> = lens
                .iter()
                .map(|len| {
                    end += len;
                    end - len..end
                })
                .collect();
            let step = step(room, blocks.len());
            assert!(step.is_multiple_of(GRAIN) && step * blocks.len() <= room.max(GRAIN * 3));
            let mut reached: Vec<usize> = blocks.iter().map(|block| block.start).collect();
            for start in starts(&blocks, step) {
                let parts = parts(&blocks, start, step);
                for (part, reached) in parts.iter().zip(&mut reached) {
                    assert!(part.is_empty() || part.start == *reached);
                    *reached += part.len();
                }
                let packed = packed(&parts);
                assert!(packed.iter().all(|place| place.end <= step * blocks.len()));
                let equal = parts.iter().all(|part| part.len() == parts[0].len());
                assert_eq!(are_a_row(&packed), equal, "{packed:?}");
            }
            let ends: Vec<usize> = blocks.iter().map(|block| block.end).collect();
            assert_eq!(reached, ends);
        }
    }
}
