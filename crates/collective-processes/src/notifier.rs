//! Waiting for another process: look first, then sleep in the system, and look whether others live.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fusestep_simd::Patience;
use rustix::fs::Timespec;
use rustix::thread::futex;

use crate::layout::Notifier;

/// Longest sleep between two looks whether the others are alive.
const NAP: Duration = Duration::from_millis(5);

/// The most sleepers that a wake-up can ask for. The system takes the number as a signed one, and
/// wakes a single sleeper for any number below 1, which `u32::MAX` is to it.
const EVERYONE: u32 = i32::MAX as u32;

impl Notifier {
    /// Wakes all sleepers; to be called after the change that they wait for.
    pub(crate) fn notify(&self) {
        // Either this sees the sleeper, or the sleeper's last look saw the change: these accesses
        // are `SeqCst`. A sleeper between its look and its sleep sees the word change.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.word.fetch_add(1, Ordering::SeqCst);
            wake(&self.word);
        }
    }

    /// Waits until `done`, or until the deadline has passed, or until `look` has seen enough; says
    /// whether `done`. `look` is called now and then.
    pub(crate) fn wait(
        &self,
        patience: Patience,
        deadline: Instant,
        done: impl Fn() -> bool,
        mut look: impl FnMut() -> bool,
    ) -> bool {
        if patience.look(&done) {
            return true;
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

/// Sleeps until the word differs from `seen` and somebody notifies, or until the time is over.
fn sleep(word: &AtomicU32, seen: u32, time: Duration) {
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().max(1).into() };
    // Whatever ends the sleep, the caller looks again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
}

/// Wakes all who sleep on the word; returns their number. After a wake-up that fails, the end of
/// the next nap makes up for it.
fn wake(word: &AtomicU32) -> usize {
    futex::wake(word, futex::Flags::empty(), EVERYONE).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wake_up_is_for_all_sleepers() {
        // A thread that is held up does not sleep yet, so that one of several tries counts.
        let all_woke = (0..20).any(|_| {
            let word = AtomicU32::new(0);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while word.load(Ordering::SeqCst) == 0 {
                            sleep(&word, 0, Duration::from_millis(900));
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(100));
                word.store(1, Ordering::SeqCst);
                wake(&word) == 3
            })
        });
        assert!(all_woke, "a wake-up left sleepers asleep");
    }
}
