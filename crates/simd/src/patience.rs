//! How ranks and threads wait for each other: they look for a while, then sleep.
//!
//! An offer of the core (`sched_yield`) reaches a party that is ready there within a microsecond. A
//! program that computes keeps the offered core for a whole slice of 3 to 4 ms. So each offer is
//! timed. A waiter that saw a slow offer makes no offer for a while and sleeps instead. A woken
//! sleeper is let in before a program that computes.

use std::cell::Cell;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// How long a waiter looks before its first offer, where there is a core for everyone. A call of a
/// few kilobytes takes less. Two parties that the system has put on one core lose this much.
const GLANCE: Duration = Duration::from_micros(1);

/// How long a waiter looks beside strangers, where it makes no offer. Waking a sleeper takes about
/// as long, which is many times an all-reduce of a few kilobytes.
const STARE: Duration = Duration::from_micros(20);

/// How often a waiter offers its core between looks before it sleeps, where there is a core for
/// everyone. All these offers take some tens of microseconds; waking a sleeper costs as much.
const OFFERS: u32 = 150;

/// How often a waiter offers its core where waiters outnumber cores. An offer lasts while another
/// party works there.
const FEW_OFFERS: u32 = 50;

/// Duration beyond which an offer has gone to a stranger. A rank's own share of a small step is
/// shorter, and beside long steps it does not matter how ranks wait.
const SLOW: Duration = Duration::from_millis(1);

/// How long a thread makes no offer after a slow one: at first, and at most. The time doubles
/// whenever the next offer is slow, too.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Sleep between two polls of something that wakes nobody.
const DOZE: Duration = Duration::from_micros(50);

/// How long waiters look before they sleep.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    has_cores: bool,
}

impl Patience {
    /// Patience of `waiters` threads or processes of this machine that wait for each other. The
    /// number of cores that the process may use is asked for once.
    pub fn of(waiters: usize) -> Self {
        static CORES: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(1, |cores| cores.get()));
        Self { has_cores: waiters <= *CORES }
    }

    /// Looks whether `done` for as long as looking is cheaper than sleeping; says whether `done`
    /// was true.
    pub fn look(self, done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        Strangers::with(|strangers| self.look_on(&System, strangers, done))
    }

    fn look_on(self, core: &impl Core, strangers: &mut Strangers, done: impl Fn() -> bool) -> bool {
        let begun = core.now();
        let are_about = strangers.are_about(begun);
        // With fewer cores than parties, a spinning waiter keeps away the party that it waits for.
        if self.has_cores && spin(core, begun + if are_about { STARE } else { GLANCE }, &done) {
            return true;
        }
        let offers = if self.has_cores { OFFERS } else { FEW_OFFERS };
        let mut offered = 0;
        while offered < offers && !strangers.are_about(begun) {
            strangers.offer(core);
            if done() {
                return true;
            }
            offered += 1;
        }
        false
    }
}

/// Times of polling for something that wakes nobody, for example a message of MPI.
#[derive(Clone, Copy, Debug)]
pub struct Polling {
    /// How long to keep the core.
    pub keep: Duration,
    /// How long to offer the core between polls, counted from the beginning. After that a pause
    /// sleeps.
    pub offer: Duration,
}

impl Polling {
    /// Pause between two polls of a waiter who has `waited` so far.
    pub fn pause(self, waited: Duration) {
        Strangers::with(|strangers| self.pause_on(&System, strangers, waited));
    }

    fn pause_on(self, core: &impl Core, strangers: &mut Strangers, waited: Duration) {
        if waited <= self.keep {
            core.spin();
        } else if waited > self.offer || strangers.are_about(core.now()) {
            core.sleep(DOZE);
        } else {
            strangers.offer(core);
        }
    }
}

fn spin(core: &impl Core, end: Instant, done: impl Fn() -> bool) -> bool {
    while core.now() < end {
        for _ in 0..LOOKS {
            core.spin();
            if done() {
                return true;
            }
        }
    }
    false
}

/// Ways to spend a core while waiting; tests have others.
trait Core {
    fn now(&self) -> Instant;
    fn spin(&self);
    fn offer(&self);
    fn sleep(&self, time: Duration);
}

struct System;

impl Core for System {
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn spin(&self) {
        std::hint::spin_loop();
    }
    fn offer(&self) {
        std::thread::yield_now();
    }
    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Programs that take offered cores, as this thread has seen them.
#[derive(Clone, Copy, Debug, Default)]
struct Strangers {
    /// End of the time for which these programs are taken to be about.
    until: Option<Instant>,
    /// Length of that time.
    pause: Duration,
}

impl Strangers {
    /// Calls `body` with this thread's memory of strangers.
    fn with<R>(body: impl FnOnce(&mut Self) -> R) -> R {
        thread_local! {
            static STRANGERS: Cell<Strangers> = const {
                Cell::new(Strangers { until: None, pause: Duration::ZERO })
            };
        }
        let mut strangers = STRANGERS.get();
        let result = body(&mut strangers);
        STRANGERS.set(strangers);
        result
    }

    fn are_about(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Offers the core once and sees who takes it.
    fn offer(&mut self, core: &impl Core) {
        let begun = core.now();
        core.offer();
        let now = core.now();
        if now.saturating_duration_since(begun) > SLOW {
            // Strangers are taken for gone after as long again without a slow offer.
            let is_again = self.until.is_some_and(|until| now < until + self.pause);
            self.pause = if is_again { (2 * self.pause).min(LONGEST) } else { SHORTEST };
            self.until = Some(now + self.pause);
        }
    }
}

#[cfg(test)]
#[path = "patience_tests.rs"]
mod tests;
