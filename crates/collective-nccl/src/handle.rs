//! Communicator of NCCL, which its rank's thread uses and any thread may end. An error ends all
//! communicators of a GPU.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fusestep_collective::{Aborter, CollectiveError};

use crate::device::Device;
use crate::library::{Comm, Nccl};

/// Error text of a rank whose communicator another thread has ended; its group knows the cause.
const ABORTED: &str = "NCCL's communicator aborted";

/// A communicator of NCCL, until it is destroyed or aborted.
#[derive(Debug)]
pub(crate) struct Handle {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    state: Mutex<State>,
    ended: Condvar,
    /// Breaks off the group that the communicator carries data for.
    aborter: Aborter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// NCCL has not made the communicator yet.
    Unmade,
    Live(Comm),
    Ending,
    Ended,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time, which the lock sees
// to.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) fn new(nccl: Arc<Nccl>, device: Arc<Device>, aborter: Aborter) -> Arc<Self> {
        let handle = Arc::new(Self {
            nccl,
            device,
            state: Mutex::new(State::Unmade),
            ended: Condvar::new(),
            aborter,
        });
        handle.device.add(&handle);
        handle
    }

    /// Makes the communicator and keeps it; returns NCCL's error if there is one.
    pub(crate) fn make(
        &self,
        make: impl FnOnce(&Nccl, &mut Comm) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut state = self.lock();
        if *state != State::Unmade {
            return Err(ABORTED.to_owned());
        }
        let mut comm = std::ptr::null_mut();
        let made = make(&self.nccl, &mut comm);
        if !comm.is_null() {
            *state = State::Live(comm);
        }
        made
    }

    /// Uses the communicator, which no thread ends meanwhile. NCCL's calls return at once.
    pub(crate) fn with<R>(
        &self,
        step: impl FnOnce(&Nccl, Comm) -> Result<R, String>,
    ) -> Result<R, String> {
        match *self.lock() {
            State::Live(comm) => step(&self.nccl, comm),
            _ => Err(ABORTED.to_owned()),
        }
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(*self.lock(), State::Live(_))
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(*self.lock(), State::Ended)
    }

    /// Destroys the communicator, which must have no work left. This may wait for other work of the
    /// GPU.
    pub(crate) fn destroy(&self) {
        // SAFETY: finalised, and this is the communicator's last use.
        self.end(|nccl, comm| unsafe { (nccl.destroy)(comm) });
    }

    /// Ends the communicator on a thread of its own, and waits up to `limit` for its end.
    pub(crate) fn abort_within(self: &Arc<Self>, limit: Duration) {
        self.abort_in_background(None);
        if !self.has_ended(Instant::now() + limit) {
            self.device.give_up();
        }
    }

    /// Starts to end the communicator on a thread of its own, and breaks its group off with
    /// `cause`.
    pub(crate) fn abort_in_background(self: &Arc<Self>, cause: Option<CollectiveError>) {
        let handle = Arc::clone(self);
        let end = move || {
            if let Some(cause) = cause {
                handle.aborter.close(cause);
            }
            handle.abort();
        };
        let builder = std::thread::Builder::new().name("end-of-communicator".to_owned());
        if let Err(error) = builder.spawn(end) {
            // Without a thread the communicator stays until the process ends.
            eprintln!("fusestep: expected a thread that ends a communicator, found {error}");
        }
    }

    /// Ends all of NCCL's work on the communicator. Giving its memory back may wait until all other
    /// work of the GPU has ended.
    fn abort(&self) {
        // SAFETY: the communicator lives, and this is its last use.
        self.end(|nccl, comm| unsafe { (nccl.abort)(comm) });
    }

    fn end(&self, last: impl FnOnce(&Nccl, Comm) -> std::ffi::c_int) {
        let comm = {
            let mut state = self.lock();
            match *state {
                State::Live(comm) => {
                    *state = State::Ending;
                    comm
                }
                State::Unmade => {
                    *state = State::Ended;
                    self.ended.notify_all();
                    return;
                }
                State::Ending | State::Ended => return,
            }
        };
        let _entered = self.device.enter();
        last(&self.nccl, comm);
        *self.lock() = State::Ended;
        self.ended.notify_all();
    }

    /// Whether the communicator ends before the deadline; waits for its end.
    fn has_ended(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if *state == State::Ended || left.is_zero() {
                return *state == State::Ended;
            }
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends this communicator and all others of its GPU, each on a thread of its own. An operation
    /// that waits for another rank keeps the GPU from freeing memory. It would block a thread that
    /// ends one communicator after the other. The groups of the other communicators are aborted
    /// with an error that names this one's. Waits until all have ended, or `limit` has passed;
    /// after that memory of the GPU is never freed.
    pub(crate) fn end_all_of_device(self: &Arc<Self>, error: &CollectiveError, limit: Duration) {
        let all = self.device.not_ended();
        for handle in &all {
            let cause = (!Arc::ptr_eq(handle, self)).then(|| CollectiveError::Aborted {
                rank: handle.aborter.rank(),
                reason: format!(
                    "its GPU, {}, ended all groups with another one, which said: {error}",
                    self.device.index
                ),
            });
            handle.abort_in_background(cause);
        }
        let deadline = Instant::now() + limit;
        if !all.iter().all(|handle| handle.has_ended(deadline)) {
            self.device.give_up();
        }
    }
}
