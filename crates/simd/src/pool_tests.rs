//! Tests of pools, on teams of rayon and of another kind.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::pool::{MAX_SHARED, MIN_PART_ELEMENTS, Order, Pool, Split, Team};
use crate::rayon_team::{MAX_WAITING, Of};

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

/// Keeps workers of a pool busy until it is dropped.
struct Busy {
    _release: Vec<std::sync::mpsc::Sender<()>>,
}

impl Busy {
    fn new(pool: &ThreadPool, workers: usize) -> Self {
        let (begun, has_begun) = std::sync::mpsc::channel();
        let keep = |_| {
            let (release, wait) = std::sync::mpsc::channel::<()>();
            let begun = begun.clone();
            pool.spawn(move || {
                begun.send(()).unwrap();
                let _ = wait.recv();
            });
            has_begun.recv().unwrap();
            release
        };
        Self { _release: (0..workers).map(keep).collect() }
    }
}

/// Fails where `body` would wait for ever.
fn within_a_minute(body: impl FnOnce() + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    let minute = std::time::Duration::from_secs(60);
    let outcome = is_done.recv_timeout(minute);
    assert!(outcome != Err(std::sync::mpsc::RecvTimeoutError::Timeout), "it waits");
    thread.join().unwrap();
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
fn busy_workers_are_not_waited_for() {
    for (threads, busy) in [(3, 1), (2, 2)] {
        let own = own_pool(threads);
        let busy = Busy::new(&own, busy);
        // Late workers find work of long ago, and no end of memory is taken for it.
        within_a_minute(move || {
            let waiting = Arc::<AtomicUsize>::default();
            let team = Of { pool: own, waiting: Arc::clone(&waiting) };
            let pool = Pool::in_team(Arc::new(team), NonZeroUsize::new(threads).unwrap());
            for _ in 0..2 * MAX_WAITING {
                let mut values = vec![0u64; 2 * MIN_PART_ELEMENTS as usize];
                pool.run(AddOne(&mut values));
                assert!(values.iter().all(|&v| v == 1));
                assert!(waiting.load(Ordering::Relaxed) <= MAX_WAITING);
            }
        });
        drop(busy);
    }
}

#[test]
fn a_worker_of_the_pool_does_what_no_other_has_begun() {
    let own = own_pool(2);
    let busy = Busy::new(&own, 1);
    within_a_minute(move || {
        own.install(|| {
            for pool in [Pool::current(), Pool::of(Arc::clone(&own))] {
                let mut values = vec![0u64; 1_000_003];
                pool.run(AddOne(&mut values));
                assert!(values.iter().all(|&v| v == 1));
            }
        });
    });
    drop(busy);
}

#[test]
fn a_worker_of_another_pool_does_not_wait_for_busy_ones() {
    let (own, other) = (own_pool(2), own_pool(2));
    let busy = Busy::new(&own, 2);
    within_a_minute(move || {
        other.install(|| {
            let mut values = vec![0u64; 1_000_003];
            Pool::of(own).run(AddOne(&mut values));
            assert!(values.iter().all(|&v| v == 1));
        });
    });
    drop(busy);
}

#[test]
fn a_call_that_has_begun_is_waited_for_whoever_panics() {
    let pool = Pool::of(own_pool(2));
    let (both, calls) = (Barrier::new(2), AtomicUsize::new(0));
    for culprit in ["the caller", "own 0", "own 1"] {
        calls.store(0, Ordering::Relaxed);
        let share = || {
            pool.share(2, Order::Forward, &|_| {
                let thread = std::thread::current();
                let name = thread.name().filter(|name| name.starts_with("own"));
                both.wait();
                if name.unwrap_or("the caller") == culprit {
                    panic!("{culprit} fails");
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
                calls.fetch_add(1, Ordering::Relaxed);
            });
        };
        let panic = catch_unwind(AssertUnwindSafe(share));
        // One of the two workers takes part.
        let fails = 2 - calls.load(Ordering::Relaxed);
        assert_eq!(panic.is_err(), fails == 1, "{culprit}");
        assert!(culprit != "the caller" || fails == 1);
    }
}
