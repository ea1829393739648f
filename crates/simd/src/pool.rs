//! Host threads: the caller's, and those of the rayon pool that the program has anyway.

use std::cmp::Reverse;
use std::fmt::Debug;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{Scope, ThreadPool};

/// Most threads that share one piece of work.
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

/// Whose threads work beside the caller.
#[derive(Clone, Debug)]
enum Workers {
    /// Those of the pool that the caller is in, or of rayon's global one.
    Current,
    /// Those of a pool of the caller's choice.
    Of(Arc<ThreadPool>),
    /// Those of another kind of pool.
    In(Arc<dyn Team>),
}

/// Threads of the program's that are in no rayon pool.
pub trait Team: Debug + Send + Sync {
    /// Calls `task` on the caller's thread, with 0, and on at most `threads − 1` others, each with
    /// a number of its own below `threads`; returns when all calls have returned.
    ///
    /// # Panics
    /// With the panic of `task`, on whichever thread, when all calls have returned.
    fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync));
}

/// The threads that work on one step: the caller's, and threads of a rayon pool.
///
/// It starts no thread of its own: what candle and the program itself have running takes part, as
/// many threads as `RAYON_NUM_THREADS` or `ThreadPoolBuilder` said, and `pool.install(|| step())`
/// steps in another pool. Workers that are busy with something else are not waited for while one
/// is free: the others do their share.
///
/// # Cost
/// Handing over a piece of work wakes one worker, which wakes the next, and allocates a few dozen
/// bytes for it, however large the work; the queue of a pool takes a block of about a kilobyte for
/// every 63 pieces from outside. With one thread nothing is handed over and nothing allocated.
#[derive(Clone, Debug)]
pub struct Pool {
    threads: NonZeroUsize,
    workers: Workers,
}

impl Pool {
    /// The caller and at most `threads − 1` workers of the pool that it is in, at most
    /// [`MAX_THREADS`] together.
    pub fn new(threads: NonZeroUsize) -> Self {
        let most = NonZeroUsize::MIN.saturating_add(MAX_THREADS - 1);
        Self { threads: threads.min(most), workers: Workers::Current }
    }

    /// As many threads as the pool has that the caller is in, rayon's global one outside of any.
    pub fn current() -> Self {
        let threads = NonZeroUsize::new(rayon::current_num_threads());
        Self::new(threads.unwrap_or(NonZeroUsize::MIN))
    }

    /// As many threads as `pool` has, its workers beside the caller.
    pub fn of(pool: Arc<ThreadPool>) -> Self {
        let threads = NonZeroUsize::new(pool.current_num_threads());
        Self { workers: Workers::Of(pool), ..Self::new(threads.unwrap_or(NonZeroUsize::MIN)) }
    }

    /// At most this many threads of `team`, the caller's among them.
    pub fn in_team(team: Arc<dyn Team>, threads: NonZeroUsize) -> Self {
        Self { workers: Workers::In(team), ..Self::new(threads) }
    }

    /// The number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Calls `task` once for each index below `count`. Each thread begins with a share of
    /// consecutive indices, the same one for the same `count`, so that what it has read it may
    /// find in its own cache in a later call, and goes on with what other threads have left.
    /// Backwards, a share begins with the index that a call in order ended with.
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
    /// A call takes what is to be done from where all calls take it until nothing is left, so that
    /// it does not matter how many there are. It is given a number below that of the threads: 0 is
    /// the caller's, a worker's is the same each time.
    fn work(&self, task: &(dyn Fn(usize) + Sync)) {
        let Some(others) = NonZeroUsize::new(self.threads() - 1) else {
            return task(0);
        };
        match &self.workers {
            Workers::Current => rayon::in_place_scope(|scope| call_all(scope, others, task)),
            Workers::Of(pool) => pool.in_place_scope(|scope| call_all(scope, others, task)),
            Workers::In(team) => team.call(self.threads, task),
        }
    }
}

/// Calls `task` here and on `others` workers.
fn call_all<'s>(scope: &Scope<'s>, others: NonZeroUsize, task: &'s (dyn Fn(usize) + Sync)) {
    scope.spawn(move |_| fan_out(others.get(), others, task));
    task(0);
}

/// Calls `task` `calls` times on this worker and on those that are free to take calls from it.
fn fan_out(calls: usize, others: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
    if calls > 1 {
        let half = calls / 2;
        rayon::join(|| fan_out(calls - half, others, task), || fan_out(half, others, task));
    } else {
        let worker = rayon::current_thread_index().unwrap_or(0);
        task(1 + worker % others);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use rayon::ThreadPoolBuilder;

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

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap())
    }

    #[test]
    fn every_element_is_visited_once_by_any_pool() {
        for threads in [1, 2, 3, 7] {
            let pool = pool(threads);
            for numel in [0, 1, 16 * 1024, 32 * 1024 - 1, 1_000_003] {
                let mut values = vec![0u64; numel];
                for _ in 0..3 {
                    pool.run(AddOne(&mut values));
                }
                assert!(values.iter().all(|&v| v == 3), "{threads} threads, {numel}");
            }
        }
    }

    #[test]
    fn every_index_is_shared_out_once_in_order_within_a_share() {
        for threads in [1, 2, 3] {
            let pool = pool(threads);
            for count in [0, 1, 2, 3, 7, MAX_SHARED] {
                for order in [Order::Forward, Order::Backward] {
                    let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    pool.share(count, order, &|index| {
                        calls[index].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
        let seen = Mutex::new(Vec::new());
        let record = |index| seen.lock().unwrap().push(index);
        pool(1).share(3, Order::Forward, &record);
        pool(1).share(3, Order::Backward, &record);
        assert_eq!(*seen.lock().unwrap(), [0, 1, 2, 2, 1, 0]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool(3);
        for culprit in 0..3 {
            let share = || {
                pool.share(3, Order::Forward, &|index| {
                    assert!(index != culprit, "index {index} fails");
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(share)).is_err());
        }
        let mut values = vec![0u64; 100_000];
        pool.run(AddOne(&mut values));
        assert!(values.iter().all(|&v| v == 1));
    }

    /// A pool of the program's own.
    fn own_pool(threads: usize) -> Arc<ThreadPool> {
        let pool = ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.thread_name(|index| format!("own {index}"));
        Arc::new(pool.build().unwrap())
    }

    /// The names of the threads that take part, each of which waits for so many to have come.
    fn who_works(pool: &Pool, most: usize) -> Vec<String> {
        let names = Mutex::new(Vec::new());
        let all_there = Barrier::new(most);
        pool.share(most, Order::Forward, &|_| {
            let name = std::thread::current().name().unwrap_or("").to_owned();
            names.lock().unwrap().push(name);
            all_there.wait();
        });
        let mut names = names.into_inner().unwrap();
        names.sort();
        names
    }

    #[test]
    fn the_callers_pool_works_and_no_other() {
        let own = own_pool(3);
        let chosen = Pool::of(Arc::clone(&own));
        assert_eq!(chosen.threads(), 3);
        let names = who_works(&chosen, 3);
        assert!(names.iter().filter(|name| name.starts_with("own")).count() == 2);
        // Within a pool, its own workers and the caller, which is one of them.
        let (threads, names) = own.install(|| {
            let pool = Pool::current();
            (pool.threads(), who_works(&pool, 3))
        });
        assert_eq!((threads, names), (3, ["own 0", "own 1", "own 2"].map(String::from).to_vec()));
    }

    /// New threads for each call.
    #[derive(Debug)]
    struct NewThreads;

    impl Team for NewThreads {
        fn call(&self, threads: NonZeroUsize, task: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|scope| {
                for number in 1..threads.get() {
                    let named = std::thread::Builder::new().name(format!("new {number}"));
                    named.spawn_scoped(scope, move || task(number)).unwrap();
                }
                task(0);
            });
        }
    }

    #[test]
    fn a_team_of_another_kind_does_all_of_the_work() {
        for threads in 1..4 {
            let pool = Pool::in_team(Arc::new(NewThreads), NonZeroUsize::new(threads).unwrap());
            assert_eq!(pool.threads(), threads);
            let mut values = vec![0u64; 1_000_003];
            pool.run(AddOne(&mut values));
            assert!(values.iter().all(|&v| v == 1));
            let names = who_works(&pool, threads);
            assert_eq!(names.iter().filter(|name| name.starts_with("new")).count(), threads - 1);
        }
    }

    #[test]
    fn busy_workers_are_not_waited_for_while_one_is_free() {
        let own = own_pool(3);
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = std::sync::mpsc::channel();
        own.spawn(move || {
            begun.send(()).unwrap();
            let _ = wait.recv();
        });
        has_begun.recv().unwrap();
        let mut values = vec![0u64; 1_000_003];
        Pool::of(own).run(AddOne(&mut values));
        assert!(values.iter().all(|&v| v == 1));
        release.send(()).unwrap();
    }
}
