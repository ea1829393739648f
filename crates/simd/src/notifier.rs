//! Waiting for an atomic to change: look first, sleep later.

use crate::sync::{AtomicUsize, Condvar, Instant, Mutex, Ordering, Patience, PoisonError, pass};

/// Wakes threads that wait until a condition on `SeqCst` atomics holds.
#[derive(Debug)]
pub struct Notifier {
    patience: Patience,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Notifier {
    /// A notifier for `waiters` threads that wait for each other.
    pub fn new(waiters: usize) -> Self {
        Self {
            patience: Patience::of(waiters),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Wakes all sleepers; to be called after the change that they wait for.
    pub fn notify(&self) {
        // Either this sees the sleeper, or the sleeper's last look saw the change: all four
        // accesses are `SeqCst`. The lock makes sure that a sleeper seen here is not
        // between its last look and its sleep.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            pass(&self.lock);
            self.changed.notify_all();
        }
    }

    /// Waits until `done` or until the deadline has passed; says whether `done`.
    pub fn wait(&self, done: impl Fn() -> bool, deadline: Option<Instant>) -> bool {
        if self.patience.look(&done) {
            return true;
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut is_done = done();
        while !is_done {
            guard = match deadline {
                None => self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    let waited = self.changed.wait_timeout(guard, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            is_done = done();
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        is_done
    }
}
