//! The threads that steps run on.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::{CpuBackend, Pool};
use pyo3::PyErr;
use pyo3::exceptions::PyRuntimeError;

/// The backend of this process, and of how many threads it was made.
static CURRENT: Mutex<Option<(u32, NonZeroUsize, Arc<CpuBackend>)>> = Mutex::new(None);

/// A backend of so many threads, the caller's among them. A process that was forked off has none of
/// its parent's threads, so it gets its own.
///
/// # Errors
/// `RuntimeError` if threads cannot be started.
pub(crate) fn backend(threads: NonZeroUsize) -> Result<Arc<CpuBackend>, PyErr> {
    let process = std::process::id();
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((of, count, backend)) = &*current
        && (*of, *count) == (process, threads)
    {
        return Ok(Arc::clone(backend));
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.get())
        .thread_name(|index| format!("fusestep-{index}"))
        .build();
    let pool = pool.map_err(|error| PyRuntimeError::new_err(format!("threads: {error}")))?;
    let backend = Arc::new(CpuBackend::in_pool(Pool::of(Arc::new(pool))));
    let before = current.replace((process, threads, Arc::clone(&backend)));
    if let Some((of, _, before)) = before
        && of != process
    {
        // Dropping it would wait for threads that are not here.
        std::mem::forget(before);
    }
    Ok(backend)
}
