//! Backends, and the threads on which steps run.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::{CpuBackend, Pool};
use pyo3::PyErr;
use pyo3::exceptions::PyRuntimeError;

use crate::openmp;

/// A backend, the process that has its threads, their number, and whether they are PyTorch's.
struct Made {
    process: u32,
    threads: NonZeroUsize,
    is_team: bool,
    backend: Arc<CpuBackend>,
}

/// Backends that were made last, the newest at the end.
static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// Most backends that are kept.
const MOST: usize = 4;

/// A backend on `threads` threads: the caller's, and PyTorch's if PyTorch is loaded. A forked
/// process has none of its parent's threads, so it gets its own.
///
/// # Errors
/// `RuntimeError` if threads cannot be started.
pub(crate) fn backend(threads: NonZeroUsize) -> Result<Arc<CpuBackend>, PyErr> {
    let process = std::process::id();
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let (team, wanted) = (openmp::team(), (process, threads));
    let is_team = team.is_some();
    let fits = |own: &&Made| (own.process, own.threads) == wanted && own.is_team == is_team;
    if let Some(own) = made.iter().find(fits) {
        return Ok(Arc::clone(&own.backend));
    }
    let pool = team.map_or_else(|| pool(threads), |team| Ok(Pool::in_team(team, threads)))?;
    let backend = Arc::new(CpuBackend::in_pool(pool));
    if made.len() == MOST {
        let oldest = made.remove(0);
        if oldest.process != process {
            // Dropping this backend would wait for threads that are not in this process.
            std::mem::forget(oldest);
        }
    }
    made.push(Made { process, threads, is_team, backend: Arc::clone(&backend) });
    Ok(backend)
}

/// A pool of the caller and workers of its own. It has one worker more than can work beside the
/// caller, since one may wake on a core where another library's threads spin.
fn pool(threads: NonZeroUsize) -> Result<Pool, PyErr> {
    if threads == NonZeroUsize::MIN {
        return Ok(Pool::new(threads));
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.get())
        .thread_name(|index| format!("fusestep-{index}"))
        .build();
    let pool = pool.map_err(|error| PyRuntimeError::new_err(format!("threads: {error}")))?;
    Ok(Pool::of(Arc::new(pool)))
}
