//! Threads that wait for work without allocating.
//!
//! A plain work-stealing pool allocates when a thread outside the pool hands it work; a step with
//! an unchanged plan must not allocate. A [`Team`] keeps its threads parked and lends them one
//! borrowed closure at a time.

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most threads of one team.
pub const MAX_THREADS: usize = 256;

/// Most parts of one piece of work; they live on the stack.
const MAX_PARTS: usize = 64;

/// Work below this many elements is not worth waking a thread for.
const MIN_PART_ELEMENTS: u64 = 16 * 1024;

/// Work that can be cut in two and done by different threads.
pub trait Split: Send + Sized {
    /// Parts that it is cut into for each thread, so that a thread that is held up leaves parts to
    /// the others. Work that cannot be cut anywhere wants more of them.
    const PARTS_PER_THREAD: usize = 8;

    /// How much there is, in elements.
    fn elements(&self) -> u64;
    /// Cuts off about the first `elements`; the parts together do what the whole would have done.
    fn split(self, elements: u64) -> (Self, Self);
    /// Does the work.
    fn run(self);
}

/// Indices that [`Team::share`] can share out.
pub const MAX_SHARED: usize = 128;

/// The order in which a thread goes through its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the first index on.
    Forward,
    /// From the last index back.
    Backward,
}

/// A closure that the threads borrow: called once on each with the thread's index.
type Task<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    state: Mutex<State>,
    work_ready: Condvar,
    work_done: Condvar,
}

struct State {
    /// Counts the tasks handed out; a thread runs a task once for each new value.
    generation: u64,
    task: Option<Task<'static>>,
    running: usize,
    panic: Option<Box<dyn std::any::Any + Send>>,
    closing: bool,
}

/// A fixed number of threads, the caller's among them, that run one piece of work at a time.
///
/// # Cost
/// `threads − 1` parked threads; handing over a piece of work costs one wake-up for each of them
/// and allocates nothing.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// One caller at a time: a second one waits here.
    turn: Mutex<()>,
}

impl Team {
    /// A team of `threads` threads, the caller's included, at most [`MAX_THREADS`].
    ///
    /// # Errors
    /// The operating system's error if a thread cannot be started.
    pub fn new(threads: NonZeroUsize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                generation: 0,
                task: None,
                running: 0,
                panic: None,
                closing: false,
            }),
            work_ready: Condvar::new(),
            work_done: Condvar::new(),
        });
        let mut team = Self {
            shared,
            threads: Vec::new(),
            turn: Mutex::new(()),
        };
        for index in 1..threads.get().min(MAX_THREADS) {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new()
                .name(format!("fusestep-{index}"))
                .spawn(move || serve(&shared, index))?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// The number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task` once for each index below `count`. Each thread begins with its own share of
    /// consecutive indices, the same one for the same `count`, so that what it has read it may
    /// find in its own cache in a later call, and goes on with what other threads have left.
    /// Backwards, a share begins with the index that a call in order ended with.
    ///
    /// # Panics
    /// If there are more than [`MAX_SHARED`] indices; with the panic of `task`.
    pub fn share(&self, count: usize, order: Order, task: &(dyn Fn(usize) + Sync)) {
        assert!(
            count <= MAX_SHARED,
            "at most {MAX_SHARED} indices are shared, found {count}"
        );
        let taken: [AtomicBool; MAX_SHARED] = std::array::from_fn(|_| AtomicBool::new(false));
        let threads = self.threads();
        self.broadcast(&|thread| {
            for of in 0..threads {
                let owner = (thread + of) % threads;
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

    /// Calls `task` once on each thread with the thread's index (the caller's is 0) and returns
    /// when all calls have returned.
    ///
    /// # Panics
    /// With the panic of `task`, after all calls have returned.
    pub fn broadcast(&self, task: Task<'_>) {
        if self.threads.is_empty() {
            return task(0);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime changes. The threads use the reference only between here and
        // the end of the wait below, where `running` has fallen to 0; this function neither
        // returns nor unwinds before that (its own call of `task` is caught), so the borrow
        // outlives every use.
        let borrowed: Task<'static> =
            unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        {
            let mut state = lock(&self.shared);
            state.generation += 1;
            state.task = Some(borrowed);
            state.running = self.threads.len();
        }
        self.shared.work_ready.notify_all();
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        let mut state = lock(&self.shared);
        while state.running > 0 {
            state = self
                .shared
                .work_done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.task = None;
        let panic = state.panic.take();
        drop(state);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Does `work` on all threads, the largest parts first, so that all end at about the same time;
    /// small work stays on the caller's.
    ///
    /// The cut depends on the number of threads, so `work` must give the same result for any cut.
    pub fn run<W: Split>(&self, work: W) {
        let wanted = (work.elements() / MIN_PART_ELEMENTS).min(MAX_PARTS as u64) as usize;
        let parts = wanted.min(self.threads() * W::PARTS_PER_THREAD);
        if self.threads() == 1 || parts < 2 {
            return work.run();
        }
        let mut slots: [Mutex<Option<W>>; MAX_PARTS] = std::array::from_fn(|_| Mutex::new(None));
        let share = work.elements().div_ceil(parts as u64);
        let mut order: [(u64, usize); MAX_PARTS] = [(0, 0); MAX_PARTS];
        let mut rest = Some(work);
        for (index, slot) in slots[..parts].iter_mut().enumerate() {
            let (part, remainder) = match rest.take() {
                Some(work) if index + 1 < parts => {
                    let (part, remainder) = work.split(share);
                    (Some(part), Some(remainder))
                }
                last => (last, None),
            };
            order[index] = (part.as_ref().map_or(0, W::elements), index);
            *slot.get_mut().unwrap_or_else(PoisonError::into_inner) = part;
            rest = remainder;
        }
        let order = &mut order[..parts];
        order.sort_unstable_by_key(|&(elements, index)| (Reverse(elements), index));
        let next = AtomicUsize::new(0);
        self.broadcast(&|_| {
            loop {
                let Some(&(_, index)) = order.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    return;
                };
                let part = slots[index]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(part) = part {
                    part.run();
                }
            }
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        lock(&self.shared).closing = true;
        self.shared.work_ready.notify_all();
        for thread in self.threads.drain(..) {
            // A thread only ends by returning: panics of tasks are caught in `serve`.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team")
            .field("threads", &self.threads())
            .finish()
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of one thread: wait for a new generation, run its task, report.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let task = {
            let mut state = lock(shared);
            loop {
                if state.closing {
                    return;
                }
                if let Some(task) = state.task
                    && state.generation != seen
                {
                    seen = state.generation;
                    break task;
                }
                state = shared
                    .work_ready
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| task(index)));
        let mut state = lock(shared);
        if let Err(panic) = outcome {
            state.panic.get_or_insert(panic);
        }
        state.running -= 1;
        if state.running == 0 {
            shared.work_done.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct AddOne<'a>(&'a mut [u64]);

    impl Split for AddOne<'_> {
        fn elements(&self) -> u64 {
            self.0.len() as u64
        }
        fn split(self, elements: u64) -> (Self, Self) {
            let middle = (elements as usize).min(self.0.len());
            let (left, right) = self.0.split_at_mut(middle);
            (AddOne(left), AddOne(right))
        }
        fn run(self) {
            for value in self.0 {
                *value += 1;
            }
        }
    }

    fn team(threads: usize) -> Team {
        Team::new(NonZeroUsize::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_element_is_visited_once_by_any_team() {
        for threads in [1, 2, 3, 7] {
            let team = team(threads);
            for numel in [0, 1, 16 * 1024, 32 * 1024 - 1, 1_000_003] {
                let mut values = vec![0u64; numel];
                for _ in 0..3 {
                    team.run(AddOne(&mut values));
                }
                assert!(values.iter().all(|&v| v == 3), "{threads} threads, {numel}");
            }
        }
    }

    #[test]
    fn broadcast_reaches_each_thread_once() {
        let team = team(4);
        let calls: [AtomicUsize; 4] = std::array::from_fn(|_| AtomicUsize::new(0));
        for _ in 0..100 {
            team.broadcast(&|index| {
                calls[index].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 100));
    }

    #[test]
    fn every_index_is_shared_out_once_in_order_within_a_share() {
        for threads in [1, 2, 3] {
            let team = team(threads);
            for count in [0, 1, 2, 3, 7, MAX_SHARED] {
                for order in [Order::Forward, Order::Backward] {
                    let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    team.share(count, order, &|index| {
                        calls[index].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
        let seen = Mutex::new(Vec::new());
        let record = |index| seen.lock().unwrap().push(index);
        team(1).share(3, Order::Forward, &record);
        team(1).share(3, Order::Backward, &record);
        assert_eq!(*seen.lock().unwrap(), [0, 1, 2, 2, 1, 0]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = team(3);
        for culprit in 0..3 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                team.broadcast(&|index| assert!(index != culprit, "thread {index} fails"));
            }));
            assert!(outcome.is_err());
        }
        let mut values = vec![0u64; 100_000];
        team.run(AddOne(&mut values));
        assert!(values.iter().all(|&v| v == 1));
    }
}
