//! Threads, and the arrays of the ceiling.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_simd::stream_4r3w;

/// One thread, and all threads if there are more.
pub(crate) fn thread_counts() -> Vec<NonZeroUsize> {
    let all = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let mut counts = vec![NonZeroUsize::MIN, all];
    counts.dedup();
    counts
}

/// The four arrays of the ceiling: read all, write three, no arithmetic to speak of.
#[derive(Debug)]
pub(crate) struct Ceiling {
    arrays: [Vec<f32>; 4],
}

impl Ceiling {
    /// Arrays of `numel` elements each, checked once.
    ///
    /// # Panics
    /// If one pass over them does not give what it must.
    pub(crate) fn new(numel: usize, backend: &CpuBackend) -> Self {
        let mut ceiling = Self {
            arrays: [
                vec![0.0; numel],
                vec![1.0; numel],
                vec![5.0; numel],
                vec![5.0; numel],
            ],
        };
        ceiling.pass(backend, 128);
        let [a, _, c, d] = &ceiling.arrays;
        let right = |values: &[f32], expected: f32| values.iter().all(|&x| x == expected);
        assert!(right(a, 1.0) && right(c, 6.0) && right(d, 4.0));
        ceiling
    }

    /// One pass, prefetching this many elements ahead.
    pub(crate) fn pass(&mut self, backend: &CpuBackend, prefetch_distance: usize) {
        let [a, b, c, d] = &mut self.arrays;
        let (team, level) = (backend.team(), backend.level());
        stream_4r3w(team, level, prefetch_distance, (a, b, c, d));
    }
}
