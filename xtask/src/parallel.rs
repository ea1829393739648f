//! Independent programs on all cores.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::thread::ScopedJoinHandle;

use anyhow::{Result, anyhow};

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

/// [`map`] with so many threads.
///
/// # Errors
/// As [`map`].
pub(crate) fn map_on<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = Mutex::new(items.iter().enumerate());
    let take = || next.lock().ok()?.next();
    let run = || {
        let mut done = Vec::new();
        while let Some((index, item)) = take() {
            done.push((index, work(item)));
        }
        done
    };
    let done = std::thread::scope(|scope| {
        let threads = (0..threads.min(items.len())).map(|_| scope.spawn(run));
        let threads: Vec<_> = threads.collect();
        let done = threads.into_iter().map(ScopedJoinHandle::join);
        done.collect::<Result<Vec<_>, _>>()
    });
    let done = done.map_err(|_| anyhow!("a thread stopped before its work was done"))?;
    let mut done: Vec<_> = done.into_iter().flatten().collect();
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
