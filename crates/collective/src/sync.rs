//! Atomics, locks and cells that [`rendezvous`](crate::rendezvous) is made of.
//!
//! A separate module, so that the model checker can put its own types in this place and compile the
//! very same files: `tests/model.rs`.

use std::cell::UnsafeCell;

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
pub(crate) use std::thread::yield_now;
pub(crate) use std::time::Instant;

pub(crate) use fusestep_simd::Notifier;

/// Memory whose users agree elsewhere on who may use it.
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Lends the memory to a reader.
    pub(crate) fn with<R>(&self, body: impl FnOnce(*const T) -> R) -> R {
        body(self.0.get())
    }

    /// Lends the memory to a writer.
    pub(crate) fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}
