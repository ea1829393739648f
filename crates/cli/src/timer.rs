//! Times of things that are called over and over.

use std::time::Instant;

/// A sample lasts at least this long, so that the clock and a wake-up do not show.
pub(crate) const MIN_SAMPLE_NS: f64 = 4e6;

/// The best time per call so far.
pub(crate) struct Timer {
    pub(crate) best: f64,
    /// Calls of one sample, so that it lasts long enough.
    pub(crate) calls: u32,
}

impl Timer {
    pub(crate) fn new() -> Self {
        Self { best: f64::INFINITY, calls: 1 }
    }

    pub(crate) fn sample<E>(&mut self, mut call: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        loop {
            let start = Instant::now();
            for _ in 0..self.calls {
                call()?;
            }
            let nanoseconds = start.elapsed().as_nanos() as f64;
            if nanoseconds >= MIN_SAMPLE_NS || self.calls >= 1 << 20 {
                self.best = self.best.min(nanoseconds / f64::from(self.calls));
                return Ok(());
            }
            self.calls *= 2;
        }
    }
}
