//! Independent programs on all cores.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

/// Calls `work` once for each item, as many at a time as there are cores; the results are in the
/// items' order.
///
/// # Errors
/// The first error in that order; all items are tried.
pub(crate) fn map<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    map_on(cores(), items, work)
}

/// [`map`] for programs that wait for deadlines most of the time: two at a time for each core.
///
/// # Errors
/// As [`map`].
pub(crate) fn map_waiting<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    map_on(2 * cores(), items, work)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn map_on<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<R>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else {
                        return;
                    };
                    let result = work(item);
                    if let Ok(mut place) = results[index].lock() {
                        *place = Some(result);
                    }
                }
            });
        }
    });
    let done = results.into_iter().map(|place| {
        let result = place.into_inner().ok().flatten();
        result.context("a thread stopped before its work was done")?
    });
    done.collect()
}
