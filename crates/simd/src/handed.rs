//! Lending a task to workers that may come late, or never.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::notifier::Notifier;
use crate::sync::{AtomicU64, Mutex, Ordering, PoisonError};

/// A task that threads call, each with a number.
type Task = dyn Fn(usize) + Sync;

/// The bit that says that the owner has taken the task back; the other bits count calls under way.
const TAKEN_BACK: u64 = 1 << 63;

/// A task that workers may call until its owner takes it back.
pub(crate) struct Handed {
    /// Pointer to the task, followed only by calls that are counted in `calls`.
    task: *const Task,
    /// Calls under way, and [`TAKEN_BACK`].
    calls: AtomicU64,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    ended: Notifier,
}

// SAFETY: the task is `Sync`, and its pointer is followed only while its owner keeps it alive.
unsafe impl Send for Handed {}
// SAFETY: as above.
unsafe impl Sync for Handed {}

/// The owner's side; takes the task back when it is dropped, also while its owner panics.
pub(crate) struct Owner<'s> {
    handed: Arc<Handed>,
    task: PhantomData<&'s Task>,
}

/// Lends a task to workers, which get it from [`Owner::handed`]. The owner and its workers are
/// `threads` threads together.
///
/// # Safety
/// The returned owner is dropped before `'s` ends, and so never forgotten.
pub(crate) unsafe fn lend<'s>(task: &'s (dyn Fn(usize) + Sync + 's), threads: usize) -> Owner<'s> {
    // SAFETY: only the lifetime changes, of a pointer that nobody follows once `Owner` was dropped.
    let task =
        unsafe { std::mem::transmute::<&'s (dyn Fn(usize) + Sync + 's), &'static Task>(task) };
    let handed = Handed {
        task,
        calls: AtomicU64::new(0),
        panic: Mutex::new(None),
        ended: Notifier::new(threads),
    };
    Owner { handed: Arc::new(handed), task: PhantomData }
}

impl Handed {
    /// Calls the task, unless it was taken back.
    pub(crate) fn call(&self, number: usize) {
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        let begin = |calls: u64| (calls & TAKEN_BACK == 0).then(|| calls + 1);
        if self.calls.fetch_update(set, get, begin).is_err() {
            return;
        }
        let called = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: this call is counted, so that the owner waits for it.
            unsafe { (*self.task)(number) }
        }));
        if let Err(panic) = called {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        if self.calls.fetch_sub(1, Ordering::SeqCst) == TAKEN_BACK + 1 {
            self.ended.notify();
        }
    }

    /// Whether the task was taken back, so that a call would do nothing.
    pub(crate) fn is_taken_back(&self) -> bool {
        self.calls.load(Ordering::SeqCst) & TAKEN_BACK != 0
    }
}

impl Owner<'_> {
    /// The workers' side of the task, which they keep for as long as they like.
    pub(crate) fn handed(&self) -> Arc<Handed> {
        Arc::clone(&self.handed)
    }

    /// Waits for the calls that have begun; none begins from now on.
    ///
    /// # Panics
    /// With the panic of a call.
    pub(crate) fn take_back(self) {
        let handed = self.handed();
        drop(self);
        let panic = handed.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        let calls = &self.handed.calls;
        if calls.fetch_or(TAKEN_BACK, Ordering::SeqCst) != 0 {
            let ended = || calls.load(Ordering::SeqCst) == TAKEN_BACK;
            while !self.handed.ended.wait(ended, None) {}
        }
    }
}
