//! Host threads that share a piece of work: the caller's, and those of a team that the program has
//! anyway.

use std::cmp::Reverse;
use std::fmt::Debug;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Most threads that share one piece of work.
pub const MAX_THREADS: usize = 256;

/// Most parts of one piece of work; they live on the stack.
const MAX_PARTS: usize = 64;

/// Work below this many elements is not worth waking a thread for.
pub(crate) const MIN_PART_ELEMENTS: u64 = 16 * 1024;

/// Work that can be cut in two and done by different threads.
pub trait Split: Send + Sized {
    /// Parts that the work is cut into for each thread, so that a held-up thread leaves parts to
    /// the others. Work that can be cut at few places only wants more parts.
    const PARTS_PER_THREAD: usize = 8;

    /// The amount of work, in elements.
    fn elements(&self) -> u64;
    /// Cuts off about the first `elements`; the parts together do what the whole would have done.
    fn split(self, elements: u64) -> (Self, Self);
    /// Does the work.
    fn run(self);
}

/// Indices that [`Pool::share`] can share out.
pub const MAX_SHARED: usize = 128;

/// The order in which a thread goes through its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the first index on.
    Forward,
    /// From the last index back.
    Backward,
}

/// Threads of the program's: workers of rayon, or of whatever else starts threads.
pub trait Team: Debug + Send + Sync {
    /// Calls `task` on the caller's thread, with 0, and on at most `threads − 1` others, each with
    /// a number below `threads`, a thread's the same each time. Returns when all calls have.
    ///
    /// # Panics
    /// With the panic of `task`, on whichever thread, when all calls have returned.
    fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync));
}

/// The threads that work on one step: the caller's, and threads of a team.
///
/// A pool starts no thread of its own: threads that the program already runs take part. Those of
/// rayon take the feature `rayon`, which adds `Pool::new`, `Pool::current` and `Pool::of`.
#[derive(Clone, Debug)]
pub struct Pool {
    threads: NonZeroUsize,
    team: Arc<dyn Team>,
}

impl Pool {
    /// At most this many threads of `team`, the caller's among them, and at most [`MAX_THREADS`].
    pub fn in_team(team: Arc<dyn Team>, threads: NonZeroUsize) -> Self {
        let most = NonZeroUsize::MIN.saturating_add(MAX_THREADS - 1);
        Self { threads: threads.min(most), team }
    }

    /// The number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Calls `task` once for each index below `count`. Each thread begins with a share of
    /// consecutive indices, then goes on with indices that other threads have left. The share is
    /// the same for the same `count`, so that a later call may find its data in the core's own
    /// cache. Backwards, a share begins with the index that a forward call ended with.
    ///
    /// # Panics
    /// If there are more than [`MAX_SHARED`] indices; with the panic of `task`.
    pub fn share(&self, count: usize, order: Order, task: &(dyn Fn(usize) + Sync)) {
        assert!(count <= MAX_SHARED, "at most {MAX_SHARED} indices are shared, found {count}");
        let taken: [AtomicBool; MAX_SHARED] = std::array::from_fn(|_| AtomicBool::new(false));
        let threads = self.threads();
        self.work(&|number| {
            for of in 0..threads {
                let owner = (number + of) % threads;
                let (first, end) = (count * owner / threads, count * (owner + 1) / threads);
                for step in 0..end - first {
                    let index = match order {
                        Order::Forward => first + step,
                        Order::Backward => end - 1 - step,
                    };
                    if !taken[index].swap(true, Ordering::Relaxed) {
                        task(index);
                    }
                }
            }
        });
    }

    /// Does `work` on all threads, the largest parts first, so that all end at about the same time;
    /// small work stays on the caller's.
    ///
    /// The cut depends on the number of threads, so `work` must give the same result for any cut.
    ///
    /// # Panics
    /// With the panic of `work`.
    pub fn run<W: Split>(&self, work: W) {
        let wanted = (work.elements() / MIN_PART_ELEMENTS).min(MAX_PARTS as u64) as usize;
        let parts = wanted.min(self.threads() * W::PARTS_PER_THREAD);
        if self.threads() == 1 || parts < 2 {
            return work.run();
        }
        let mut cut: [Mutex<Option<W>>; MAX_PARTS] = std::array::from_fn(|_| Mutex::new(None));
        let share = work.elements().div_ceil(parts as u64);
        let mut order: [(u64, usize); MAX_PARTS] = [(0, 0); MAX_PARTS];
        let mut rest = Some(work);
        for (index, place) in cut[..parts].iter_mut().enumerate() {
            let (part, remainder) = match rest.take() {
                Some(work) if index + 1 < parts => {
                    let (part, remainder) = work.split(share);
                    (Some(part), Some(remainder))
                }
                last => (last, None),
            };
            order[index] = (part.as_ref().map_or(0, W::elements), index);
            *place.get_mut().unwrap_or_else(PoisonError::into_inner) = part;
            rest = remainder;
        }
        let order = &mut order[..parts];
        order.sort_unstable_by_key(|&(elements, index)| (Reverse(elements), index));
        let next = AtomicUsize::new(0);
        self.work(&|_| {
            while let Some(&(_, index)) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                let part = cut[index].lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(part) = part {
                    part.run();
                }
            }
        });
    }

    /// Calls `task` on the caller's thread and, while that works, on workers; returns when all
    /// calls have returned.
    ///
    /// Calls take parts of the work from one common place until none is left, so the number of
    /// calls does not matter. A call is given a number below that of the threads: 0 is the
    /// caller's, a worker's is the same each time.
    fn work(&self, task: &(dyn Fn(usize) + Sync)) {
        match self.threads() {
            1 => task(0),
            _ => self.team.call(self.threads, task),
        }
    }
}
