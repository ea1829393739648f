//! Atomics and locks that [`notifier`](crate::notifier) and [`handed`](crate::handed) are made of.
//!
//! A separate module, so that the model checker can put its own types in this place and compile the
//! very same files: `tests/model.rs`.

#[cfg(any(test, feature = "rayon"))]
pub(crate) use std::sync::atomic::AtomicU64;
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, PoisonError};
pub(crate) use std::time::Instant;

pub(crate) use crate::patience::Patience;

/// Waits until nobody holds the lock.
pub(crate) fn pass(lock: &Mutex<()>) {
    drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
}
