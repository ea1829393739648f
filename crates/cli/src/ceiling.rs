//! The ceiling: the memory bandwidth that a step is held against, of a stream of as many arrays and
//! bytes.

use std::convert::Infallible;

use fusestep_coalesce::HostMemory;
use fusestep_cpu::CpuBackend;
use fusestep_launch::Access;
use fusestep_planner::Plan;
use fusestep_simd::{MAX_WRITTEN, PREFETCH_DISTANCES, stream};

use crate::timer::Timer;

/// Arrays that together have a step's traffic.
pub(crate) struct Ceiling<'a> {
    backend: &'a CpuBackend,
    read: HostMemory,
    written: Vec<HostMemory>,
    numel: usize,
    /// Timers, one for each prefetch distance.
    timers: Vec<Timer>,
}

impl<'a> Ceiling<'a> {
    /// A ceiling with as many arrays as the plan's first kernel has lists, and with `len_bytes`
    /// bytes of traffic.
    pub(crate) fn new(
        backend: &'a CpuBackend,
        plan: &Plan,
        len_bytes: u64,
    ) -> anyhow::Result<Self> {
        let lists = plan.storages().first().map(|storage| &storage.lists);
        let writes = lists.map_or(1, |lists| {
            let written = lists.iter().filter(|list| list.access == Access::ReadWrite);
            written.count().clamp(1, MAX_WRITTEN)
        });
        let numel = len_bytes.div_ceil(bytes_per_element(writes)).max(1) as usize;
        // Aligned like a state's tensors: vectors that cross cache lines would make the ceiling too
        // low.
        let array = || -> anyhow::Result<HostMemory> {
            let mut memory = HostMemory::zeroed(numel * size_of::<f32>())?;
            // Written once, because untouched pages would all be the same page of zeros.
            memory.elements_mut::<f32>().fill(1.0);
            Ok(memory)
        };
        Ok(Self {
            backend,
            read: array()?,
            written: (0..writes).map(|_| array()).collect::<Result<_, _>>()?,
            numel,
            timers: PREFETCH_DISTANCES.iter().map(|_| Timer::new()).collect(),
        })
    }

    /// Arrays read.
    pub(crate) fn reads(&self) -> usize {
        self.written.len() + 1
    }

    /// Arrays written.
    pub(crate) fn writes(&self) -> usize {
        self.written.len()
    }

    /// Bytes that one stream moves.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.numel as u64 * bytes_per_element(self.writes())
    }

    /// Times the stream of one prefetch distance.
    pub(crate) fn sample(&mut self, index: usize) {
        let mut timer = std::mem::replace(&mut self.timers[index], Timer::new());
        let streamed: Result<(), Infallible> = timer.sample(|| {
            self.stream(index);
            Ok(())
        });
        let Ok(()) = streamed;
        self.timers[index] = timer;
    }

    /// Streams once, at one prefetch distance.
    pub(crate) fn stream(&mut self, index: usize) {
        let (pool, level) = (self.backend.pool(), self.backend.level());
        let read = self.read.elements::<f32>();
        let writes = self.written.len();
        let mut lists = self.written.iter_mut();
        let mut written: [&mut [f32]; MAX_WRITTEN] = std::array::from_fn(|_| {
            lists.next().map_or(&mut [][..], HostMemory::elements_mut::<f32>)
        });
        stream(pool, level, PREFETCH_DISTANCES[index], read, &mut written[..writes]);
    }

    /// The prefetch distance in bytes and the bandwidth of the best stream.
    pub(crate) fn best(&self) -> (usize, f64) {
        let bytes = self.len_bytes() as f64;
        let rates = self.timers.iter().map(|timer| bytes / timer.best);
        let rates = PREFETCH_DISTANCES.iter().copied().zip(rates);
        let best = rates.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
        (best.0 * size_of::<f32>(), best.1)
    }
}

/// Bytes that one element moves in a stream with this number of written arrays.
fn bytes_per_element(writes: usize) -> u64 {
    (2 * writes + 1) as u64 * size_of::<f32>() as u64
}

/// A share of the memory bandwidth; the reason beside one above 1.
pub(crate) struct Share(pub(crate) f64);

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3}", self.0)?;
        if self.0 > MOST_SHARE {
            f.write_str(
                "; more than 1: caches kept what the step needs, or other programs ran while the \
                 bandwidth was measured",
            )?;
        }
        Ok(())
    }
}

/// Share above which noise is no reason any more.
const MOST_SHARE: f64 = 1.02;
