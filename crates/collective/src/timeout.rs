//! How long a rank waits for others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest timeout; a longer timeout is cut to this one, so that every wait ends.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A limit of waits. Clones are the same limit, which any thread may set.
#[derive(Clone, Debug)]
pub struct Timeout(Arc<AtomicU64>);

impl Timeout {
    /// A limit of at most [`MAX_TIMEOUT`].
    pub fn new(limit: Duration) -> Self {
        Self(Arc::new(AtomicU64::new(nanoseconds(limit))))
    }

    /// The limit that was set last.
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Sets the limit of waits that begin from now on.
    pub fn set(&self, limit: Duration) {
        self.0.store(nanoseconds(limit), Ordering::Relaxed);
    }
}

fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.min(MAX_TIMEOUT).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_one_limit_of_a_day_at_most() {
        let own = Timeout::new(Duration::from_secs(3));
        own.clone().set(Duration::MAX);
        assert_eq!(own.get(), MAX_TIMEOUT);
    }
}
