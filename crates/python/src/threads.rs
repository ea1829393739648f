//! The threads that steps run on.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::{CpuBackend, Pool};
use pyo3::PyErr;
use pyo3::exceptions::PyRuntimeError;

/// A backend, the process that has its threads, and how many they are.
struct Made {
    process: u32,
    threads: NonZeroUsize,
    backend: Arc<CpuBackend>,
}

/// The backends made last, the newest at the end.
static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// Most backends that are kept.
const MOST: usize = 4;

/// A backend of so many threads, the caller's among them. A process that was forked off has none of
/// its parent's threads, so it gets its own.
///
/// # Errors
/// `RuntimeError` if threads cannot be started.
pub(crate) fn backend(threads: NonZeroUsize) -> Result<Arc<CpuBackend>, PyErr> {
    let process = std::process::id();
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(own) = made.iter().find(|own| (own.process, own.threads) == (process, threads)) {
        return Ok(Arc::clone(&own.backend));
    }
    let backend = Arc::new(CpuBackend::in_pool(pool(threads)?));
    if made.len() == MOST {
        let oldest = made.remove(0);
        if oldest.process != process {
            // Dropping it would wait for threads that are not here.
            std::mem::forget(oldest);
        }
    }
    made.push(Made { process, threads, backend: Arc::clone(&backend) });
    Ok(backend)
}

/// The caller and workers of its own: one more than can work beside it, since one may be woken on
/// a core where another library's threads spin.
fn pool(threads: NonZeroUsize) -> Result<Pool, PyErr> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.get())
        .thread_name(|index| format!("fusestep-{index}"))
        .build();
    let pool = pool.map_err(|error| PyRuntimeError::new_err(format!("threads: {error}")))?;
    Ok(Pool::of(Arc::new(pool)))
}
