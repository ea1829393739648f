//! The memory traffic of an optimizer step with next to no arithmetic: the ceiling that kernels are
//! measured against.

use crate::{Level, Pool, Split, prefetch_ahead};

/// Prefetch distances worth trying, in f32 elements; 0 is no prefetch.
pub const PREFETCH_DISTANCES: [usize; 6] = [0, 128, 256, 512, 768, 1024];

/// Elements between two prefetches of one stream: one cache line of f32.
const LINE: usize = 16;

/// Most arrays that [`stream`] writes.
pub const MAX_WRITTEN: usize = 5;

/// Streams arrays that are read and written and one that is only read, as an optimizer step does
/// with parameter and state, and the gradient: one is written for SGD, 2 for momentum, 3 for Adam.
///
/// ```text
/// w ← w + r        for every written array w
/// ```
///
/// Not generic, so that the loops are compiled as this crate is and not as its caller.
///
/// # Shapes
/// All slices have the same numel; the excess of longer ones is not touched.
/// # Panics
/// If no array is written, or more than [`MAX_WRITTEN`].
/// # Cost
/// 8·W + 4 bytes of memory traffic per element, for W written arrays.
pub fn stream(
    pool: &Pool,
    level: Level,
    prefetch_distance: usize,
    read: &[f32],
    written: &mut [&mut [f32]],
) {
    match written.len() {
        1 => stream_written::<1>(pool, level, prefetch_distance, read, written),
        2 => stream_written::<2>(pool, level, prefetch_distance, read, written),
        3 => stream_written::<3>(pool, level, prefetch_distance, read, written),
        4 => stream_written::<4>(pool, level, prefetch_distance, read, written),
        MAX_WRITTEN => {
            stream_written::<MAX_WRITTEN>(pool, level, prefetch_distance, read, written);
        }
        found => panic!("expected 1 to {MAX_WRITTEN} written arrays, found {found}"),
    }
}

fn stream_written<const W: usize>(
    pool: &Pool,
    level: Level,
    prefetch_distance: usize,
    read: &[f32],
    written: &mut [&mut [f32]],
) {
    let mut lists = written.iter_mut();
    let written: [&mut [f32]; W] =
        std::array::from_fn(|_| lists.next().map_or(&mut [][..], |list| &mut **list));
    let shortest = written.iter().map(|list| list.len()).min();
    let numel = read.len().min(shortest.unwrap_or(0));
    pool.run(Stream {
        level,
        prefetch_distance,
        read: &read[..numel],
        written: written.map(|list| &mut list[..numel]),
    });
}

struct Stream<'a, const W: usize> {
    level: Level,
    prefetch_distance: usize,
    read: &'a [f32],
    written: [&'a mut [f32]; W],
}

impl<const W: usize> Split for Stream<'_, W> {
    fn elements(&self) -> u64 {
        self.read.len() as u64
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let middle = (elements as usize).next_multiple_of(LINE);
        let middle = middle.min(self.read.len());
        let (read, read_rest) = self.read.split_at(middle);
        let mut rest: [&mut [f32]; W] = std::array::from_fn(|_| &mut [][..]);
        let mut rests = rest.iter_mut();
        let written = self.written.map(|list| {
            let (first, second) = list.split_at_mut(middle);
            if let Some(rest) = rests.next() {
                *rest = second;
            }
            first
        });
        let part = |read, written| Stream {
            level: self.level,
            prefetch_distance: self.prefetch_distance,
            read,
            written,
        };
        (part(read, written), part(read_rest, rest))
    }

    fn run(self) {
        let ahead = self.prefetch_distance;
        let Stream { level, read, mut written, .. } = self;
        level.run(
            #[inline(always)]
            || {
                let whole = read.len() - read.len() % LINE;
                for first in (0..whole).step_by(LINE) {
                    if ahead > 0 {
                        prefetch_ahead(read, first + ahead);
                        for list in &written {
                            prefetch_ahead(list, first + ahead);
                        }
                    }
                    let added = load(read, first);
                    // All lines are loaded before the first is stored. Indices instead of iterators
                    // and closures, which would not be compiled for the level.
                    let mut lines = [[0.0; LINE]; W];
                    for list in 0..W {
                        lines[list] = load(written[list], first);
                    }
                    for line in &mut lines {
                        for lane in 0..LINE {
                            line[lane] += added[lane];
                        }
                    }
                    for list in 0..W {
                        written[list][first..first + LINE].copy_from_slice(&lines[list]);
                    }
                }
                for list in &mut written {
                    add(&mut list[whole..], &read[whole..]);
                }
            },
        );
    }
}

/// One line, loaded as a whole before anything is stored.
#[inline(always)]
fn load(from: &[f32], first: usize) -> [f32; LINE] {
    let mut line = [0.0; LINE];
    line.copy_from_slice(&from[first..first + LINE]);
    line
}

/// One line of the stream; on arrays of known length it becomes one vector instruction.
#[inline(always)]
fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    fn touches_every_element_once<const W: usize>() {
        let pool = Pool::new(NonZeroUsize::new(2).unwrap());
        for numel in [0, 1, 15, 16, 17, 100_003] {
            let read = vec![1.0; numel];
            let mut written: [Vec<f32>; W] = std::array::from_fn(|list| vec![list as f32; numel]);
            let mut slices = written.each_mut().map(|list| &mut list[..]);
            stream(&pool, Level::detect(), 128, &read, &mut slices);
            for (list, values) in written.iter().enumerate() {
                assert!(values.iter().all(|&x| x == list as f32 + 1.0), "{numel}");
            }
        }
    }

    #[test]
    fn streams_touch_every_element_once() {
        touches_every_element_once::<1>();
        touches_every_element_once::<2>();
        touches_every_element_once::<3>();
        touches_every_element_once::<4>();
        touches_every_element_once::<5>();
    }
}
