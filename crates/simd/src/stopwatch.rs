//! The time since a moment, for those who ask more often than the system's clock is quick.

use std::time::Instant;

/// Shortest time after which the counter's pace is known well enough: the system's clock was read
/// to some 50 ns at both ends.
const LEARNING_NS: u64 = 1_000_000;

/// Longest time between two looks at the system's clock.
const TRUSTED_NS: u64 = 1_000_000_000;

/// Binary places of a pace below the nanosecond.
const PLACES: u32 = 32;

/// Nanoseconds since a moment; never fewer than it said before.
///
/// Where the system's clock is made of the processor's time-stamp counter, as Linux says in
/// `/sys/devices/system/clocksource/clocksource0/current_clocksource`, so is this one: its pace is
/// learnt from the system's clock, which is looked at again before as much time has passed as the
/// pace was learnt in, and at least once a second. What it says is within some 100 ns of the
/// system's clock. Elsewhere it is the system's clock.
///
/// # Cost
/// 8 ns from the counter, 20 ns from the system's clock (docs/PERFORMANCE.md).
#[derive(Debug)]
pub struct Stopwatch {
    begun: Instant,
    counter: Option<Counter>,
    last_ns: u64,
}

impl Stopwatch {
    /// Counts from `begun`, or from 0 if that is still to come.
    pub fn new(begun: Instant) -> Self {
        Self {
            begun,
            counter: look_at_both(begun).map(|(ticks, ns)| Counter::new(ticks, ns)),
            last_ns: 0,
        }
    }

    /// Nanoseconds since the beginning.
    #[inline]
    pub fn now_ns(&mut self) -> u64 {
        let told = match (&self.counter, ticks()) {
            (Some(counter), Some(ticks)) => counter.at(ticks),
            _ => None,
        };
        let now_ns = told.unwrap_or_else(|| self.look());
        self.last_ns = self.last_ns.max(now_ns);
        self.last_ns
    }

    /// Looks at the system's clock.
    #[cold]
    fn look(&mut self) -> u64 {
        match (&mut self.counter, look_at_both(self.begun)) {
            (Some(counter), Some((ticks, now_ns))) => {
                counter.learn(ticks, now_ns);
                now_ns
            }
            _ => since(self.begun),
        }
    }
}

fn since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The counter and the system's clock at the same time, or as near to it as three attempts come: a
/// thread that loses the processor between the two would learn a wrong pace.
fn look_at_both(begun: Instant) -> Option<(u64, u64)> {
    let attempt = |_| {
        let before = ticks()?;
        let ns = since(begun);
        let width = ticks()?.wrapping_sub(before);
        Some((width, before.wrapping_add(width / 2), ns))
    };
    let (_, ticks, ns) = (0..3).filter_map(attempt).min()?;
    Some((ticks, ns))
}

/// A counter of even pace beside a clock.
#[derive(Debug, PartialEq)]
struct Counter {
    /// The first of both.
    first: (u64, u64),
    /// The last of both.
    last: (u64, u64),
    /// Nanoseconds of a tick, with [`PLACES`] binary places.
    pace: u64,
    /// Ticks after the last for which the pace is trusted; 0 before there is one.
    trusted: u64,
}

impl Counter {
    fn new(ticks: u64, ns: u64) -> Self {
        Self {
            first: (ticks, ns),
            last: (ticks, ns),
            pace: 0,
            trusted: 0,
        }
    }

    /// The nanosecond of a tick; `None` where the clock must be looked at.
    #[inline]
    fn at(&self, ticks: u64) -> Option<u64> {
        // A counter that was set back is as far ahead.
        let passed = ticks.wrapping_sub(self.last.0);
        (passed < self.trusted)
            .then(|| self.last.1 + ((u128::from(passed) * u128::from(self.pace)) >> PLACES) as u64)
    }

    /// Takes the pace from the first look on; begins anew if the two cannot be told to have gone on
    /// together.
    fn learn(&mut self, ticks: u64, ns: u64) {
        let (passed, passed_ns) = match (
            ticks.checked_sub(self.first.0),
            ns.checked_sub(self.first.1),
        ) {
            (Some(ticks), Some(ns)) if ticks > 0 => (ticks, ns),
            _ => return *self = Self::new(ticks, ns),
        };
        if passed_ns < LEARNING_NS {
            return;
        }
        let pace = (u128::from(passed_ns) << PLACES) / u128::from(passed);
        let Some(pace) = u64::try_from(pace).ok().filter(|&pace| pace > 0) else {
            return *self = Self::new(ticks, ns);
        };
        let trusted = (u128::from(passed_ns.min(TRUSTED_NS)) << PLACES) / u128::from(pace);
        self.last = (ticks, ns);
        self.pace = pace;
        self.trusted = u64::try_from(trusted).unwrap_or(u64::MAX);
    }
}

/// The processor's time-stamp counter, where the system's clock is made of it.
#[inline]
fn ticks() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::sync::OnceLock;
        static IS_CLOCK: OnceLock<bool> = OnceLock::new();
        let is_clock = || {
            let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
            std::fs::read_to_string(path).is_ok_and(|name| name.trim() == "tsc")
        };
        if *IS_CLOCK.get_or_init(is_clock) {
            // SAFETY: every x86-64 has the instruction, and a system whose own clock reads it lets
            // programs read it: Linux's does so in their address space.
            return Some(unsafe { std::arch::x86_64::_rdtsc() });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_learnt_trusted_for_as_long_and_learnt_again() {
        // 2.5 ticks a nanosecond from tick 1,000 and nanosecond 70 on.
        let tick = |ns: u64| 1000 + (ns - 70) * 5 / 2;
        let mut counter = Counter::new(1000, 70);
        assert_eq!(counter.at(1000), None);
        counter.learn(tick(1_000_069), 1_000_069);
        assert_eq!(counter, Counter::new(1000, 70), "too early");
        counter.learn(tick(1_000_070), 1_000_070);
        for ns in [1_000_070, 1_000_072, 1_500_000, 2_000_068] {
            let told = counter.at(tick(ns)).unwrap();
            assert!(told.abs_diff(ns) <= 1, "{told} for {ns}");
        }
        assert_eq!(counter.at(tick(2_000_080)), None);
        // Later it is trusted for longer, but not for more than a second.
        counter.learn(tick(5_000_000_070), 5_000_000_070);
        let told = counter.at(tick(5_999_000_000)).unwrap();
        assert!(told.abs_diff(5_999_000_000) <= 1, "{told}");
        assert_eq!(counter.at(tick(6_000_000_100)), None);
    }

    #[test]
    fn a_counter_that_was_set_back_is_not_believed() {
        let mut counter = Counter::new(1_000_000, 0);
        counter.learn(3_000_000, 2_000_000);
        assert_eq!(counter.at(2_999_999), None);
        counter.learn(500, 2_500_000);
        assert_eq!(counter, Counter::new(500, 2_500_000));
        // Nor one that stands still.
        counter.learn(500, 9_000_000);
        assert_eq!(counter, Counter::new(500, 9_000_000));
        // Nor one that went so far that no pace is left.
        let mut counter = Counter::new(0, 0);
        counter.learn(u64::MAX, LEARNING_NS);
        assert_eq!(counter.trusted, 0);
    }

    #[test]
    fn it_goes_as_the_systems_clock_and_never_back() {
        let begun = Instant::now();
        let mut watch = Stopwatch::new(begun);
        let mut last = 0;
        while last < 20_000_000 {
            let before = since(begun);
            let now_ns = watch.now_ns();
            let after = since(begun);
            assert!(now_ns >= last, "{now_ns} after {last}");
            // A thousandth, far more than it is out and far less than a mistake in its pace would
            // be.
            let slack = 10_000 + after / 1000;
            assert!(
                now_ns + slack >= before && now_ns <= after + slack,
                "{now_ns}, expected {before} to {after}"
            );
            last = now_ns;
        }
    }
}
