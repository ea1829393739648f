//! The model checker's side of `src/sync.rs`, here and in `crates/collective`, and changes for the
//! worse.

use std::cell::Cell as Setting;
use std::time::Duration;

pub(crate) use std::sync::PoisonError;
pub(crate) use std::sync::atomic::Ordering;

pub(crate) use crate::notifier::Notifier;

pub(crate) use loom::sync::{Mutex, MutexGuard};
pub(crate) use loom::thread::yield_now;

use loom::sync::atomic::fence;

pub(crate) type Cell<T> = loom::cell::UnsafeCell<T>;

/// What is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    Nothing,
    /// Sleepers are not woken.
    SilentNotifier,
    /// The notifier does not wait for a sleeper between its last look and its sleep.
    NotifierWithoutLock,
    /// The count of sleepers is not ordered with the change that they wait for.
    SleepersUnordered,
    /// Arrivals and departures order nothing else: who sees that a party has come may not see what
    /// it brought.
    GateUnordered,
    /// Arrivals and deadlines look at the gate first and write it later, and so write over each
    /// other.
    GateTorn,
    /// A party takes the others' departures for counted before they are.
    EarlyDeparture,
    /// Claims look at what is claimed first and write it later, and so get the same bytes.
    ClaimsTorn,
}

thread_local! {
    // The model runs all its threads on the one that called it.
    static CHANGE: Setting<Change> = const { Setting::new(Change::Nothing) };
}

fn changed(change: Change) -> bool {
    CHANGE.get() == change
}

/// Whether anything is.
pub(crate) fn is_changed() -> bool {
    !changed(Change::Nothing)
}

/// Runs `body` with something broken; it stays broken after a panic, for the rest of the model.
pub(crate) fn with_change(change: Change, body: impl FnOnce()) {
    CHANGE.set(change);
    body();
    CHANGE.set(Change::Nothing);
}

/// As `src/patience.rs` has it; a model need not look twice.
#[derive(Debug)]
pub(crate) struct Patience;

impl Patience {
    pub(crate) fn of(_waiters: usize) -> Self {
        Self
    }
    pub(crate) fn look(&self, _done: impl Fn() -> bool) -> bool {
        false
    }
}

/// Models have no clocks: a deadline has passed whenever its waiter looks, which may be at any
/// moment, or it never does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instant {
    left: Duration,
}

pub(crate) const NEVER: Instant = Instant { left: Duration::MAX };
pub(crate) const PASSED: Instant = Instant { left: Duration::ZERO };

impl Instant {
    pub(crate) fn now() -> Self {
        NEVER
    }

    pub(crate) fn saturating_duration_since(self, _now: Self) -> Duration {
        self.left
    }
}

#[derive(Debug)]
pub(crate) struct AtomicU64(loom::sync::atomic::AtomicU64);

/// The model takes `SeqCst` for acquire and release, which suffices for arrivals and departures.
fn order(order: Ordering) -> Ordering {
    if changed(Change::GateUnordered) { Ordering::Relaxed } else { order }
}

impl AtomicU64 {
    pub(crate) fn new(value: u64) -> Self {
        Self(loom::sync::atomic::AtomicU64::new(value))
    }
    pub(crate) fn load(&self, asked: Ordering) -> u64 {
        self.0.load(order(asked))
    }
    pub(crate) fn store(&self, value: u64, asked: Ordering) {
        self.0.store(value, order(asked));
    }
    pub(crate) fn fetch_add(&self, value: u64, asked: Ordering) -> u64 {
        // Only departures are counted by it.
        let counted = if changed(Change::EarlyDeparture) { 2 * value } else { value };
        self.0.fetch_add(counted, order(asked))
    }
    pub(crate) fn fetch_sub(&self, value: u64, asked: Ordering) -> u64 {
        self.0.fetch_sub(value, order(asked))
    }
    pub(crate) fn fetch_or(&self, value: u64, asked: Ordering) -> u64 {
        self.0.fetch_or(value, order(asked))
    }
    pub(crate) fn fetch_update(
        &self,
        set: Ordering,
        fetch: Ordering,
        mut update: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        if changed(Change::GateTorn) {
            let seen = self.0.load(fetch);
            let new = update(seen).ok_or(seen)?;
            self.0.store(new, set);
            return Ok(seen);
        }
        self.0.fetch_update(order(set), order(fetch), update)
    }
}

/// The count of sleepers, and of claimed bytes. Either the notifier sees a sleeper or the sleeper
/// sees the change: that takes one order of all accesses, which the model knows of fences only.
/// Claims take no order but their own.
#[derive(Debug)]
pub(crate) struct AtomicUsize(loom::sync::atomic::AtomicUsize);

fn fenced<R>(access: impl FnOnce() -> R) -> R {
    if changed(Change::SleepersUnordered) {
        return access();
    }
    fence(Ordering::SeqCst);
    let result = access();
    fence(Ordering::SeqCst);
    result
}

impl AtomicUsize {
    pub(crate) fn new(value: usize) -> Self {
        Self(loom::sync::atomic::AtomicUsize::new(value))
    }
    pub(crate) fn load(&self, asked: Ordering) -> usize {
        fenced(|| self.0.load(asked))
    }
    pub(crate) fn fetch_add(&self, value: usize, asked: Ordering) -> usize {
        fenced(|| self.0.fetch_add(value, asked))
    }
    pub(crate) fn store(&self, value: usize, asked: Ordering) {
        self.0.store(value, asked);
    }
    pub(crate) fn fetch_update(
        &self,
        set: Ordering,
        fetch: Ordering,
        mut update: impl FnMut(usize) -> Option<usize>,
    ) -> Result<usize, usize> {
        if changed(Change::ClaimsTorn) {
            let seen = self.0.load(fetch);
            self.0.store(update(seen).ok_or(seen)?, set);
            return Ok(seen);
        }
        self.0.fetch_update(set, fetch, update)
    }
    pub(crate) fn fetch_sub(&self, value: usize, asked: Ordering) -> usize {
        fenced(|| self.0.fetch_sub(value, asked))
    }
}

#[derive(Debug)]
pub(crate) struct Condvar(loom::sync::Condvar);

type Waited<'a> = Result<MutexGuard<'a, ()>, PoisonError<MutexGuard<'a, ()>>>;
type WaitedUntil<'a> = Result<(MutexGuard<'a, ()>, bool), PoisonError<(MutexGuard<'a, ()>, bool)>>;

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }
    pub(crate) fn wait<'a>(&self, guard: MutexGuard<'a, ()>) -> Waited<'a> {
        self.0.wait(guard)
    }
    /// Asked only with time left, which means for ever.
    pub(crate) fn wait_timeout<'a>(
        &self,
        guard: MutexGuard<'a, ()>,
        _left: Duration,
    ) -> WaitedUntil<'a> {
        match self.0.wait(guard) {
            Ok(guard) => Ok((guard, false)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), false))),
        }
    }
    pub(crate) fn notify_all(&self) {
        if !changed(Change::SilentNotifier) {
            self.0.notify_all();
        }
    }
}

/// Waits until nobody holds the lock.
pub(crate) fn pass(lock: &Mutex<()>) {
    if !changed(Change::NotifierWithoutLock) {
        drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
