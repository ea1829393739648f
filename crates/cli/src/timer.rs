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

    /// Whether nothing was timed yet. The first call must not be timed: it touches memory that the
    /// system has to find first.
    pub(crate) fn is_cold(&self) -> bool {
        self.best.is_infinite()
    }

    pub(crate) fn sample<E>(&mut self, mut call: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        if self.is_cold() {
            call()?;
        }
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_first_call_is_not_timed() {
        let (mut timer, mut calls) = (Timer::new(), 0);
        let mut call = || {
            calls += 1;
            // Memory that is touched for the first time.
            std::thread::sleep(Duration::from_millis(if calls == 1 { 500 } else { 5 }));
            Ok::<_, Infallible>(())
        };
        let Ok(()) = timer.sample(&mut call);
        assert!(!timer.is_cold() && timer.best < 450e6, "{}", timer.best);
        let Ok(()) = timer.sample(&mut call);
        assert_eq!(calls, 3);
    }
}
