//! What [`notifier`](crate::notifier) and [`rendezvous`](crate::rendezvous) are made of.
//!
//! A module of its own, so that the model checker can put its own in this place and compile the
//! very same two files: `tests/model.rs`.

use std::cell::UnsafeCell;

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
pub(crate) use std::thread::yield_now;
pub(crate) use std::time::Instant;

/// How often a waiter looks before it sleeps.
pub(crate) struct Patience {
    /// Looks before it gives its core away, where there is a core for everyone.
    pub(crate) spins: u32,
    /// Looks between which it offers its core to others.
    pub(crate) yields: u32,
}

/// Some tens of microseconds. A sleeper costs tens of microseconds to wake, which is many times an
/// all-reduce of a few kilobytes.
///
/// Few looks come before the first offer: a call of a few kilobytes takes less than these, and
/// where the system has put two parties on one core, which it does while others use the rest,
/// whoever looks keeps the other from coming.
pub(crate) const PATIENCE: Patience = Patience { spins: 64, yields: 150 };

/// Memory whose users agree elsewhere on who may use it.
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Lends it to a reader.
    pub(crate) fn with<R>(&self, body: impl FnOnce(*const T) -> R) -> R {
        body(self.0.get())
    }

    /// Lends it to a writer.
    pub(crate) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}

/// Waits until nobody holds the lock.
pub(crate) fn pass(lock: &Mutex<()>) {
    drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
}
