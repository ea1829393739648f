//! Waiting for another process: spin first, then sleep in the system, and look after the others.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::Timespec;
use rustix::thread::futex;

use crate::layout::Notifier;

/// How often a waiter looks before it offers its core, and how often it does that before it sleeps:
/// as ranks that are threads do.
const SPINS: u32 = 64;
const YIELDS: u32 = 150;

/// Longest sleep between two looks at whether the others are alive.
const NAP: Duration = Duration::from_millis(5);

/// How long to wait before sleeping, for so many ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// For `ranks` processes of one machine. With fewer cores, whoever spins keeps others away.
    pub(crate) fn of(ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let (spins, yields) = if ranks <= cores { (SPINS, YIELDS) } else { (0, YIELDS / 3) };
        Self { spins, yields }
    }
}

impl Notifier {
    /// Wakes all sleepers; to be called after the change that they wait for.
    pub(crate) fn notify(&self) {
        // Either this sees the sleeper, or the sleeper's last look saw the change: these accesses
        // are `SeqCst`. A sleeper between its look and its sleep sees the word change.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.word.fetch_add(1, Ordering::SeqCst);
            // A wake-up that fails is made up for by the next nap's end.
            let _ = futex::wake(&self.word, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Waits until `done`, or until the deadline has passed, or until `look`, which is asked now
    /// and then, has seen enough; says whether `done`.
    pub(crate) fn wait(
        &self,
        patience: Patience,
        deadline: Instant,
        done: impl Fn() -> bool,
        mut look: impl FnMut() -> bool,
    ) -> bool {
        for _ in 0..patience.spins {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        for _ in 0..patience.yields {
            if done() {
                return true;
            }
            std::thread::yield_now();
        }
        loop {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let word = self.word.load(Ordering::SeqCst);
            let is_done = done();
            if !is_done {
                let left = deadline.saturating_duration_since(Instant::now());
                sleep(&self.word, word, left.min(NAP));
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            if is_done || done() {
                return true;
            }
            if look() || Instant::now() >= deadline {
                return done();
            }
        }
    }
}

/// Sleeps until the word is another one and somebody notifies, or the time is over.
fn sleep(word: &std::sync::atomic::AtomicU32, seen: u32, time: Duration) {
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().max(1).into() };
    // Whatever ends it, the caller looks again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
}
