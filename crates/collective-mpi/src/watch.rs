//! Threads that look after ranks which cannot look after themselves: blocked within MPI, or about
//! to be ended by the launcher.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use fusestep_collective::{Aborter, CollectiveError};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::group::Group;

/// Groups whose recorders are written when the launcher ends the job.
static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// Groups that make calls of MPI which do not come back by themselves.
static TIMED: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// Groups on shared memory, which write their recorders when they are broken off.
static ABORTERS: Mutex<Vec<Aborter>> = Mutex::new(Vec::new());

/// How long those have for it.
const WRITING_TIME: Duration = Duration::from_millis(200);

static SIGNALS_WATCHED: AtomicBool = AtomicBool::new(false);
static CLOCK_WATCHED: AtomicBool = AtomicBool::new(false);

/// Looks after a new group.
pub(crate) fn register(group: &Arc<Group>) {
    if group.options.dump_folder.is_none() {
        return;
    }
    let mut groups = lock(&GROUPS);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(group));
    drop(groups);
    watch_signals();
}

/// Breaks a group on shared memory off when the launcher ends the job: whoever waits in a call of
/// it writes its recorder then.
pub(crate) fn abort_at_end(aborter: Aborter) {
    lock(&ABORTERS).push(aborter);
    watch_signals();
}

fn watch_signals() {
    if SIGNALS_WATCHED.swap(true, Ordering::SeqCst) {
        return;
    }
    // Without it the recorder is lost when the launcher ends the job; everything else works.
    if let Ok(mut signals) = Signals::new([SIGTERM]) {
        let watch = move || {
            for signal in signals.forever() {
                dump_all();
                abort_all();
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        };
        let _ = std::thread::Builder::new().name("mpi-signals".to_owned()).spawn(watch);
    }
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

fn dump_all() {
    let groups = lock(&GROUPS).clone();
    for group in groups.iter().filter_map(Weak::upgrade) {
        if let Some(Ok(path)) = group.dump() {
            say(&format!(
                "rank {}: the launcher ends the job; the flight recorder is {}",
                group.rank,
                path.display()
            ));
        }
    }
}

fn abort_all() {
    let aborters = std::mem::take(&mut *lock(&ABORTERS));
    for aborter in &aborters {
        aborter.abort("the launcher ends the job");
    }
    if !aborters.is_empty() {
        std::thread::sleep(WRITING_TIME);
    }
}

/// Writes the recorders of all groups but `reported`, which has written its own and said so.
pub(crate) fn dump_others(reported: &Group) {
    let groups = lock(&GROUPS).clone();
    for group in groups.iter().filter_map(Weak::upgrade) {
        if !std::ptr::eq(Arc::as_ptr(&group), reported) {
            // Nothing more can be done about an error: the job ends.
            let _ = group.dump();
        }
    }
}

/// Writes a line to standard error in one piece: other threads and ranks write there, too.
pub(crate) fn say(line: &str) {
    // Nobody is left to tell that it cannot be written.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Looks after calls of a group that MPI may not come back from: ends the job when one is still
/// under way at its [deadline](Deadline).
pub(crate) fn register_timed(group: &Arc<Group>) {
    let mut timed = lock(&TIMED);
    timed.retain(|group| group.strong_count() > 0);
    timed.push(Arc::downgrade(group));
    drop(timed);
    if !CLOCK_WATCHED.swap(true, Ordering::SeqCst) {
        let watch = || {
            loop {
                std::thread::sleep(Duration::from_millis(50));
                end_overdue();
            }
        };
        let _ = std::thread::Builder::new().name("mpi-clock".to_owned()).spawn(watch);
    }
}

/// By when the call under way in a group must be back; two stores per call, since short calls take
/// no more than microseconds.
#[derive(Debug, Default)]
pub(crate) struct Deadline(AtomicU64);

impl Deadline {
    /// Sets it, in nanoseconds of the group's life, until the result is dropped. One call at a
    /// time.
    pub(crate) fn set(&self, ns: u64) -> Armed<'_> {
        self.0.store(ns.max(1), Ordering::Release);
        Armed(self)
    }

    fn is_over(&self, now_ns: u64) -> bool {
        let ns = self.0.load(Ordering::Acquire);
        ns != 0 && now_ns > ns
    }
}

/// Takes the deadline back when dropped.
pub(crate) struct Armed<'a>(&'a Deadline);

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

fn end_overdue() {
    let groups = lock(&TIMED).clone();
    let mut groups = groups.iter().filter_map(Weak::upgrade);
    let Some(group) = groups.find(|group| group.deadline.is_over(group.now_ns())) else {
        return;
    };
    // Those that are blocked, too, say so and are not late.
    group.die(CollectiveError::Late {
        ranks: group.others().collect(),
        operation: "all-reduce",
        sequence: group.entered.load(Ordering::SeqCst),
        bucket: None,
        timeout_ms: group.timeout_ms(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_counts_while_a_call_is_under_way() {
        let deadline = Deadline::default();
        assert!(!deadline.is_over(u64::MAX));
        let armed = deadline.set(10);
        assert!(!deadline.is_over(10) && deadline.is_over(11));
        drop(armed);
        assert!(!deadline.is_over(u64::MAX));
        let _armed = deadline.set(0);
        assert!(deadline.is_over(2), "0 means none");
    }
}
