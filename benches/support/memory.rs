//! Threads, and the arrays of the ceiling.

use std::num::NonZeroUsize;

use fusestep_coalesce::HostMemory;
use fusestep_cpu::CpuBackend;
use fusestep_simd::stream;

/// One thread, and all threads if there are more.
pub(crate) fn thread_counts() -> Vec<NonZeroUsize> {
    let all = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let mut counts = vec![NonZeroUsize::MIN, all];
    counts.dedup();
    counts
}

/// The four arrays of the ceiling: read all, write three, no arithmetic to speak of.
///
/// They lie as a state's buffers do: a plain `Vec` starts 16 bytes into a page, and every vector of
/// it would cross a cache line.
#[derive(Debug)]
pub(crate) struct Ceiling {
    arrays: [HostMemory; 4],
}

impl Ceiling {
    /// Arrays of `numel` elements each, checked once.
    ///
    /// # Panics
    /// If one pass over them does not give what it must.
    pub(crate) fn new(numel: usize, backend: &CpuBackend) -> Self {
        let arrays = [1.0f32, 2.0, 3.0, 4.0].map(|value| {
            let mut memory = HostMemory::zeroed(numel * size_of::<f32>()).expect("memory");
            memory.elements_mut().fill(value);
            memory
        });
        let mut ceiling = Self { arrays };
        ceiling.pass(backend, 128);
        for (array, expected) in ceiling.arrays.iter().zip([1.0f32, 3.0, 4.0, 5.0]) {
            assert!(array.elements().iter().all(|&x: &f32| x == expected));
        }
        ceiling
    }

    /// One pass, prefetching this many elements ahead.
    pub(crate) fn pass(&mut self, backend: &CpuBackend, prefetch_distance: usize) {
        let [read, written @ ..] = &mut self.arrays;
        let mut written = written.each_mut().map(HostMemory::elements_mut);
        let (pool, level) = (backend.pool(), backend.level());
        stream(pool, level, prefetch_distance, read.elements(), &mut written);
    }
}
