//! The memory traffic of an optimizer step with next to no arithmetic: the ceiling that kernels are measured against.

use crate::{Level, Split, Team, prefetch_ahead};

/// Prefetch distances worth trying, in f32 elements; 0 is no prefetch.
pub const PREFETCH_DISTANCES: [usize; 5] = [0, 128, 256, 512, 1024];

/// Elements between two prefetches of one stream: one cache line of f32.
const LINE: usize = 16;

/// Streams four arrays of equal numel, reading all and writing `a`, `c` and `d`, as an Adam step does.
///
/// ```text
/// c ← c + b        d ← d − b        a ← max(a, b)
/// ```
///
/// # Shapes
/// All four slices have the same numel; the excess of longer ones is not touched.
/// # Cost
/// 28 bytes of memory traffic per element.
pub fn stream_4r3w(
    team: &Team,
    level: Level,
    prefetch_distance: usize,
    arrays: (&mut [f32], &[f32], &mut [f32], &mut [f32]),
) {
    let (a, b, c, d) = arrays;
    let numel = a.len().min(b.len()).min(c.len()).min(d.len());
    team.run(Stream {
        level,
        prefetch_distance,
        a: &mut a[..numel],
        b: &b[..numel],
        c: &mut c[..numel],
        d: &mut d[..numel],
    });
}

struct Stream<'a> {
    level: Level,
    prefetch_distance: usize,
    a: &'a mut [f32],
    b: &'a [f32],
    c: &'a mut [f32],
    d: &'a mut [f32],
}

impl Split for Stream<'_> {
    fn elements(&self) -> u64 {
        self.a.len() as u64
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let middle = (elements as usize).next_multiple_of(LINE).min(self.a.len());
        let (a, a_rest) = self.a.split_at_mut(middle);
        let (b, b_rest) = self.b.split_at(middle);
        let (c, c_rest) = self.c.split_at_mut(middle);
        let (d, d_rest) = self.d.split_at_mut(middle);
        let Self {
            level,
            prefetch_distance,
            ..
        } = self;
        (
            Stream {
                level,
                prefetch_distance,
                a,
                b,
                c,
                d,
            },
            Stream {
                level,
                prefetch_distance,
                a: a_rest,
                b: b_rest,
                c: c_rest,
                d: d_rest,
            },
        )
    }

    fn run(self) {
        let ahead = self.prefetch_distance;
        let Stream {
            level, a, b, c, d, ..
        } = self;
        level.run(
            #[inline(always)]
            || {
                let whole = a.len() - a.len() % LINE;
                for first in (0..whole).step_by(LINE) {
                    if ahead > 0 {
                        prefetch_ahead(a, first + ahead);
                        prefetch_ahead(b, first + ahead);
                        prefetch_ahead(c, first + ahead);
                        prefetch_ahead(d, first + ahead);
                    }
                    let line = first..first + LINE;
                    let [mut x, mut y, mut z] = [load(a, first), load(c, first), load(d, first)];
                    touch(&mut x, &load(b, first), &mut y, &mut z);
                    a[line.clone()].copy_from_slice(&x);
                    c[line.clone()].copy_from_slice(&y);
                    d[line].copy_from_slice(&z);
                }
                touch(
                    &mut a[whole..],
                    &b[whole..],
                    &mut c[whole..],
                    &mut d[whole..],
                );
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

/// One line of the stream; on arrays of known length it becomes a few vector instructions.
#[inline(always)]
fn touch(a: &mut [f32], b: &[f32], c: &mut [f32], d: &mut [f32]) {
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        *c += b;
        *d -= b;
        *a = if *a > *b { *a } else { *b };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    #[test]
    fn the_stream_touches_every_element_once() {
        let team = Team::new(NonZeroUsize::new(2).unwrap()).unwrap();
        for numel in [0, 1, 15, 16, 17, 100_003] {
            let (mut a, b) = (vec![0.0; numel], vec![1.0; numel]);
            let (mut c, mut d) = (vec![5.0; numel], vec![5.0; numel]);
            stream_4r3w(&team, Level::detect(), 128, (&mut a, &b, &mut c, &mut d));
            assert!(a.iter().all(|&x| x == 1.0), "{numel}");
            assert!(c.iter().all(|&x| x == 6.0) && d.iter().all(|&x| x == 4.0));
        }
    }
}
