//! Threads that stay on cores of the caller's choice.
//!
//! A step beside a backward pass, or beside another process's step, is to leave cores alone. Its
//! threads are workers of a pool of their own, each bound to a core for its life. The caller's
//! thread waits, and its own affinity is never touched.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fusestep::Pool;
use fusestep::simd::MAX_THREADS;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use rayon::ThreadPool;

/// Workers that are bound to cores.
#[derive(Clone)]
pub(crate) struct Cores {
    workers: Arc<ThreadPool>,
    pool: Pool,
}

/// Workers, the cores that they are bound to, and the process that has them.
struct Made {
    process: u32,
    cores: Vec<usize>,
    own: Cores,
}

/// Workers that were made last, the newest at the end.
static MADE: Mutex<Vec<Made>> = Mutex::new(Vec::new());

/// Most sets of cores whose workers are kept.
const MOST: usize = 4;

impl Cores {
    /// The workers of these cores, one on each.
    ///
    /// # Errors
    /// `ValueError` for no cores, too many, or one that the process may not run on; `RuntimeError`
    /// if threads cannot be started.
    pub(crate) fn of(mut cores: Vec<usize>) -> Result<Self, PyErr> {
        cores.sort_unstable();
        cores.dedup();
        if cores.is_empty() || cores.len() > MAX_THREADS {
            let found = cores.len();
            return Err(PyValueError::new_err(format!(
                "cores: expected 1 to {MAX_THREADS} numbers of CPUs, found {found}"
            )));
        }
        let process = std::process::id();
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = made.iter().find(|own| own.process == process && own.cores == cores) {
            return Ok(own.own.clone());
        }
        let own = Self::start(&cores)?;
        if made.len() == MOST {
            let oldest = made.remove(0);
            if oldest.process != process {
                // Dropping these would wait for threads that are not in this process.
                std::mem::forget(oldest);
            }
        }
        made.push(Made { process, cores, own: own.clone() });
        Ok(own)
    }

    fn start(cores: &[usize]) -> Result<Self, PyErr> {
        // The first core that the system has refused, plus 1.
        let refused = Arc::new(AtomicI32::new(0));
        let (of_worker, told) = (cores.to_vec(), Arc::clone(&refused));
        let workers = rayon::ThreadPoolBuilder::new()
            .num_threads(cores.len())
            .thread_name(|index| format!("fusestep-core-{index}"))
            .start_handler(move |index| {
                let core = of_worker[index];
                if !bind(core) {
                    let number =
                        i32::try_from(core).map_or(i32::MAX, |core| core.saturating_add(1));
                    let _ = told.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
                }
            })
            .build();
        let failed = |error| PyRuntimeError::new_err(format!("threads: {error}"));
        let workers = Arc::new(workers.map_err(failed)?);
        // Behind it every worker has begun.
        workers.broadcast(|_| ());
        match refused.load(Ordering::Relaxed) {
            0 => Ok(Self { pool: Pool::of(Arc::clone(&workers)), workers }),
            number => Err(PyValueError::new_err(format!(
                "cores: expected CPUs that this process may run on, found {}; \
                 `os.sched_getaffinity(0)` has those it may, on Linux",
                number - 1
            ))),
        }
    }

    /// Runs work that shares itself out on these cores, while the caller waits.
    pub(crate) fn run<R: Send>(&self, work: impl FnOnce(&Pool) -> R + Send) -> R {
        self.workers.install(|| work(&self.pool))
    }
}

/// Binds the calling thread to a core; whether the system has let it.
#[cfg(target_os = "linux")]
fn bind(core: usize) -> bool {
    use std::ffi::c_int;

    /// Bits of the masks that are given: CPUs that Linux can have.
    const MOST_CORES: usize = 8192;

    unsafe extern "C" {
        /// `int sched_setaffinity(pid_t, size_t, const cpu_set_t*)` of the C library.
        fn sched_setaffinity(thread: c_int, len_bytes: usize, mask: *const u64) -> c_int;
    }
    let mut mask = [0u64; MOST_CORES / 64];
    let Some(word) = mask.get_mut(core / 64) else {
        return false;
    };
    *word = 1 << (core % 64);
    // SAFETY: 0 is the calling thread, and the mask has so many bytes, which are only read.
    unsafe { sched_setaffinity(0, size_of_val(&mask), mask.as_ptr()) == 0 }
}

/// Binds the calling thread to a core; other systems than Linux are not asked.
#[cfg(not(target_os = "linux"))]
fn bind(_: usize) -> bool {
    false
}
