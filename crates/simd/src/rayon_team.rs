//! Threads of rayon as teams: those of the pool that the program has anyway.

use std::error::Error;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use rayon::{Scope, ThreadPool, ThreadPoolBuilder};

use crate::handed::lend;
use crate::pool::{Pool, Team};

/// Most pieces of work that wait for a worker to look at them; beyond these callers work alone.
pub(crate) const MAX_WAITING: usize = 1024;

/// Threads of rayon.
///
/// Threads that candle and the program already run take part, as many as `RAYON_NUM_THREADS` or
/// `ThreadPoolBuilder` said; `pool.install(|| step())` steps in another pool. Workers that are busy
/// with something else, or late because other programs have their cores, are not waited for. Other
/// threads do their share.
///
/// # Cost
/// Handing over a piece of work wakes one worker, which wakes the next, and allocates a few dozen
/// bytes for it, however large the work; the queue of a pool takes a block of about a kilobyte for
/// every 63 pieces from outside. With one thread nothing is handed over and nothing allocated.
impl Pool {
    /// The caller and at most `threads − 1` workers of the pool that it is in, at most
    /// [`MAX_THREADS`](crate::MAX_THREADS) together.
    pub fn new(threads: NonZeroUsize) -> Self {
        Self::in_team(Arc::new(Current), threads)
    }

    /// All threads of the pool that the caller is in, or of rayon's global pool outside of any.
    /// Only the caller's thread where the system gives no others, which [`start_workers`] tells.
    pub fn current() -> Self {
        let threads = if has_workers() { rayon::current_num_threads() } else { 1 };
        Self::new(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN))
    }

    /// The caller and workers of `pool`, together as many threads as `pool` has.
    pub fn of(pool: Arc<ThreadPool>) -> Self {
        let threads = NonZeroUsize::new(pool.current_num_threads());
        let team = Arc::new(Of { pool, waiting: Arc::default() });
        Self::in_team(team, threads.unwrap_or(NonZeroUsize::MIN))
    }
}

/// Threads of the pool that the caller is in, or of rayon's global pool.
#[derive(Debug)]
struct Current;

/// Threads of a pool of the caller's choice.
#[derive(Debug)]
pub(crate) struct Of {
    pub(crate) pool: Arc<ThreadPool>,
    /// The pool's count of waiting work.
    pub(crate) waiting: Arc<AtomicUsize>,
}

// A worker of the pool that waits does by itself what no other worker has begun. A thread outside
// of the pool, also a worker of another pool, would wait for a worker to begin. Beside other
// programs a worker may come milliseconds late.
//
// Calls take parts of the work from one common place until none is left, so the number of calls
// does not matter.
impl Team for Current {
    fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
        let Some(others) = NonZeroUsize::new(threads.get() - 1).filter(|_| has_workers()) else {
            return task(0);
        };
        if rayon::current_thread_index().is_some() {
            rayon::in_place_scope(|scope| call_all(scope, others, task));
        } else {
            static WAITING: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);
            call_with(rayon::spawn, &WAITING, others, task);
        }
    }
}

impl Team for Of {
    fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
        let Some(others) = NonZeroUsize::new(threads.get() - 1) else {
            return task(0);
        };
        if self.pool.current_thread_index().is_some() {
            self.pool.in_place_scope(|scope| call_all(scope, others, task));
        } else {
            call_with(|job| self.pool.spawn(job), &self.waiting, others, task);
        }
    }
}

/// Starts rayon's global pool, unless it runs. Other ways to start it panic where the system gives
/// no threads.
///
/// # Errors
/// The system's reason. No work of a [`Pool`] outside of another rayon pool is shared out then: the
/// caller's thread does it alone, with the same bits.
pub fn start_workers() -> io::Result<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| match ThreadPoolBuilder::new().build_global() {
        // A pool that somebody has started before is as good.
        Err(error) if error.source().is_some() => Err(error.to_string()),
        _ => Ok(()),
    });
    started.clone().map_err(io::Error::other)
}

/// Whether the caller is in a pool, or the global one runs.
fn has_workers() -> bool {
    rayon::current_thread_index().is_some() || start_workers().is_ok()
}

/// Calls `task` here and on at most `others` workers that come while the caller works. `waiting`
/// counts pieces of work that no worker has looked at yet, also pieces that are done.
fn call_with(
    spawn: impl FnOnce(Box<dyn FnOnce() + Send>),
    waiting: &Arc<AtomicUsize>,
    others: NonZeroUsize,
    task: &(dyn Fn(usize) + Sync),
) {
    if waiting.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
        waiting.fetch_sub(1, Ordering::Relaxed);
        return task(0);
    }
    let waiting = Arc::clone(waiting);
    // SAFETY: dropped before this function returns, which the task outlives.
    let owner = unsafe { lend(task, others.get() + 1) };
    let handed = owner.handed();
    spawn(Box::new(move || {
        waiting.fetch_sub(1, Ordering::Relaxed);
        if !handed.is_taken_back() {
            fan_out(others.get(), others, &|number| handed.call(number));
        }
    }));
    task(0);
    owner.take_back();
}

/// Calls `task` here and on `others` workers.
fn call_all<'s>(scope: &Scope<'s>, others: NonZeroUsize, task: &'s (dyn Fn(usize) + Sync)) {
    scope.spawn(move |_| fan_out(others.get(), others, task));
    task(0);
}

/// Calls `task` `calls` times on this worker and on those that are free to take calls from it.
fn fan_out(calls: usize, others: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
    if calls > 1 {
        let half = calls / 2;
        rayon::join(|| fan_out(calls - half, others, task), || fan_out(half, others, task));
    } else {
        let worker = rayon::current_thread_index().unwrap_or(0);
        task(1 + worker % others);
    }
}
