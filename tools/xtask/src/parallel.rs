//! Independent programs on all cores.

use anyhow::Result;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

/// Calls `work` once for each item, as many at a time as there are cores; the results are in the
/// items' order.
///
/// # Errors
/// The first error in that order; all items are tried.
pub(crate) fn map<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    // Begun in their order, which callers choose.
    let begun = items.iter().enumerate().par_bridge();
    let mut done: Vec<_> = begun.map(|(index, item)| (index, work(item))).collect();
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// [`map`] for programs that wait for deadlines most of the time: two at a time for each core.
///
/// # Errors
/// As [`map`].
pub(crate) fn map_waiting<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    map_on(2 * rayon::current_num_threads(), items, work)
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
    ThreadPoolBuilder::new().num_threads(threads).build()?.install(|| map(items, &work))
}
