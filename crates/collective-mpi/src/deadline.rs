//! Deadlines of calls from which MPI may not come back.

use std::sync::atomic::{AtomicU64, Ordering};

/// Deadline of the call under way in a group. It costs two stores per call, since a short call
/// takes microseconds only.
#[derive(Debug, Default)]
pub(crate) struct Deadline(AtomicU64);

impl Deadline {
    /// Sets the deadline, in nanoseconds since the group was founded, until the result is dropped.
    /// One call at a time.
    pub(crate) fn set(&self, ns: u64) -> Armed<'_> {
        self.0.store(ns.max(1), Ordering::Release);
        Armed(self)
    }

    pub(crate) fn is_over(&self, now_ns: u64) -> bool {
        let ns = self.0.load(Ordering::Acquire);
        ns != 0 && now_ns > ns
    }
}

/// Guard that clears the deadline when dropped.
pub(crate) struct Armed<'a>(&'a Deadline);

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_counts_while_a_call_is_under_way() {
        let deadline = Deadline::default();
        assert!(!deadline.is_over(u64::MAX));
        let armed = deadline.set(10);
        assert!(!deadline.is_over(10) && deadline.is_over(11));
        drop(armed);
        assert!(!deadline.is_over(u64::MAX));
        let _armed = deadline.set(0);
        assert!(deadline.is_over(2), "0 means none");
    }
}
