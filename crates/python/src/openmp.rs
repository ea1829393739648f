//! Threads of the OpenMP library on which PyTorch's own kernels run.
//!
//! These threads spin for some milliseconds after a backward pass. Other threads would share the
//! cores with them, and a step would take half as long again. PyTorch's threads begin at once.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fusestep::Team;
use libloading::Library;

/// `void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags)`: the function
/// that GCC calls for `#pragma omp parallel`. The libraries of LLVM and Intel have it as well.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Threads of an OpenMP library, which keeps a team for each thread that calls it.
#[derive(Debug)]
struct OpenMp {
    parallel: Parallel,
    /// `int omp_get_thread_num(void)`
    number: unsafe extern "C" fn() -> c_int,
    /// Keeps the functions loaded.
    _library: Library,
}

/// The OpenMP library that PyTorch was found to use, and the process that found it.
static FOUND: OnceLock<(u32, Option<Arc<OpenMp>>)> = OnceLock::new();

/// Looks up the OpenMP library that the library in `file` uses, at the first call.
pub(crate) fn look_in(file: &str) {
    FOUND.get_or_init(|| {
        if is_forked() {
            return (std::process::id(), None);
        }
        // SAFETY: the file is PyTorch's extension module, which the interpreter has loaded; what it
        // depends on is searched as well, and these names are OpenMP's.
        let found = unsafe {
            Library::new(file).and_then(|library| {
                let parallel = *library.get(b"GOMP_parallel")?;
                let number = *library.get(b"omp_get_thread_num")?;
                Ok(OpenMp { parallel, number, _library: library })
            })
        };
        (std::process::id(), found.ok().map(Arc::new))
    });
}

/// Whether this process was forked and still runs its parent's program, in which PyTorch may have
/// had threads. Only Linux tells.
fn is_forked() -> bool {
    /// `PF_FORKNOEXEC` of the kernel.
    const FORKED: u64 = 0x40;
    let stat = std::fs::read("/proc/self/stat").unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    // The flags are the seventh field after the program's name, which is free text in brackets.
    let flags = stat.rsplit(')').next().and_then(|fields| fields.split_whitespace().nth(6));
    flags.and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|flags| flags & FORKED != 0)
}

/// PyTorch's threads. A forked process has none of its parent's threads, and the library would wait
/// for them.
pub(crate) fn team() -> Option<Arc<dyn Team>> {
    let (process, found) = FOUND.get()?;
    let found = found.clone().filter(|_| *process == std::process::id())?;
    Some(found)
}

/// Arguments of a call, which all threads share.
struct Call<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    number: unsafe extern "C" fn() -> c_int,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Team for OpenMp {
    fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
        let call = Call { task, number: self.number, panic: Mutex::new(None) };
        let threads = c_uint::try_from(threads.get()).unwrap_or(c_uint::MAX);
        // SAFETY: it calls `take_part` with the address of `call`, which threads only read, and
        // returns when all calls have returned.
        unsafe { (self.parallel)(take_part, (&raw const call).cast_mut().cast(), threads, 0) };
        if let Some(panic) = call.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

/// Part of a call that each thread runs.
extern "C" fn take_part(call: *mut c_void) {
    // SAFETY: `OpenMp::call` has given this address, and waits.
    let call = unsafe { &*call.cast_const().cast::<Call<'_>>() };
    // SAFETY: it may be called anywhere.
    let number = unsafe { (call.number)() };
    let done = catch_unwind(AssertUnwindSafe(|| (call.task)(usize::try_from(number).unwrap_or(0))));
    if let Err(panic) = done {
        *call.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
    }
}
