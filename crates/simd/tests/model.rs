//! Tasks that threads lend each other, run through all interleavings of their steps and all values
//! that their atomics may show.
//!
//! `handed.rs` and `notifier.rs` are compiled here once more, on the model checker's locks and
//! atomics in place of those of `sync.rs`. A lost wake-up is a deadlock of the model; memory used
//! after it was given back is a race on one of its cells. Everyday runs bound how often a thread is
//! interrupted where it could go on; `--ignored` runs without bound or with more threads, for
//! minutes. The meeting of ranks has a model of its own, in `crates/collective`.

// `is_taken_back` spares threads work and guards nothing.
#[allow(dead_code)]
#[path = "../src/handed.rs"]
mod handed;
// Only what the scenarios use; the rest is the same code.
#[allow(dead_code, unreachable_pub)]
#[path = "../src/notifier.rs"]
mod notifier;
#[allow(dead_code, unused_imports)]
#[path = "model/sync.rs"]
mod sync;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use sync::Change;

/// Memory that the model watches: written by its owner alone, read by tasks.
struct Memory(Arc<UnsafeCell<u64>>);

impl Memory {
    // The model runs all its threads in one.
    #[allow(clippy::arc_with_non_send_sync)]
    fn new() -> Self {
        Self(Arc::new(UnsafeCell::new(0)))
    }

    fn write(&self, value: u64) {
        self.0.with_mut(|memory| {
            // SAFETY: the model ends with an error where another thread could use the cell now.
            unsafe { *memory = value }
        });
    }

    fn read(&self) -> u64 {
        self.0.with(|memory| {
            // SAFETY: as above.
            unsafe { *memory }
        })
    }
}

/// Memory that tasks of several threads use.
struct Watched(Memory);

// SAFETY: the model runs all its threads in one, and ends with an error where two race.
unsafe impl Sync for Watched {}

/// An owner lends a task, does it itself and takes it back while workers come, once or again; what
/// the task uses is the owner's own before and behind.
fn handed_over(workers: usize, calls: usize) {
    let memory = Watched(Memory::new());
    memory.0.write(1);
    let read = |memory: &Watched| assert_eq!(memory.0.read(), 1);
    let task = |_: usize| read(&memory);
    // SAFETY: taken back below, and a model that panics runs no further.
    let owner = unsafe { handed::lend(&task, 1 + workers) };
    let mut threads = Vec::new();
    for _ in 0..workers {
        let handed = owner.handed();
        threads.push(loom::thread::spawn(move || {
            for number in 1..=calls {
                handed.call(number);
            }
        }));
    }
    task(0);
    owner.take_back();
    memory.0.write(2);
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Runs a scenario through the interleavings with at most so many interruptions, or through all.
fn check(interruptions: Option<usize>, scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = interruptions;
    builder.check(scenario);
}

#[test]
fn a_task_is_its_owners_again_when_it_was_taken_back() {
    check(Some(3), || handed_over(1, 2));
    check(Some(2), || handed_over(2, 1));
}

#[test]
#[ignore = "minutes"]
fn without_bound() {
    check(None, || handed_over(1, 2));
    check(Some(3), || handed_over(2, 2));
}

/// A model that finds nothing in broken code proves nothing about the code.
#[test]
fn each_change_for_the_worse_is_found() {
    for (change, expected) in [
        (Change::SilentNotifier, "deadlock"),
        (Change::NotifierWithoutLock, "deadlock"),
        (Change::GateUnordered, "Causality violation"),
    ] {
        let found = catch_unwind(AssertUnwindSafe(|| {
            check(Some(3), move || sync::with_change(change, || handed_over(1, 1)));
        }));
        let panic = found.expect_err("the model must find what was broken");
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
            .unwrap_or_default();
        assert!(text.contains(expected), "{change:?}: expected {expected}, found {text}");
    }
}
