//! Threads that watch over a rank which is blocked within MPI or about to be ended by the launcher.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use fusestep_collective::{Aborter, CollectiveError};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::group::Group;
use crate::say::say;

/// Groups whose recorders are written when the launcher ends the job.
static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// Groups that make calls of MPI which do not come back by themselves.
static TIMED: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// Groups on shared memory, which write their recorders when they are broken off.
static ABORTERS: Mutex<Vec<Aborter>> = Mutex::new(Vec::new());

/// Time that groups on shared memory have to write their recorders.
const WRITING_TIME: Duration = Duration::from_millis(200);

static SIGNALS_WATCHED: AtomicBool = AtomicBool::new(false);
static CLOCK_WATCHED: AtomicBool = AtomicBool::new(false);

/// Adds a group whose recorder is written when the launcher ends the job.
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

/// Aborts a group on shared memory when the launcher ends the job. A rank that waits in a call then
/// writes its recorder.
pub(crate) fn abort_at_end(aborter: Aborter) {
    lock(&ABORTERS).push(aborter);
    watch_signals();
}

fn watch_signals() {
    if SIGNALS_WATCHED.swap(true, Ordering::SeqCst) {
        return;
    }
    // Without the signal's handler the recorder is lost when the launcher ends the job; everything
    // else works.
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

/// Writes the recorders of all groups but `reported`, which has written its own.
pub(crate) fn dump_others(reported: &Group) {
    let groups = lock(&GROUPS).clone();
    for group in groups.iter().filter_map(Weak::upgrade) {
        if !std::ptr::eq(Arc::as_ptr(&group), reported) {
            // An error changes nothing: the job ends.
            let _ = group.dump();
        }
    }
}

/// Watches calls of a group from which MPI may not come back. The job ends when a call is still
/// under way at its [deadline](crate::deadline::Deadline).
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

fn end_overdue() {
    let groups = lock(&TIMED).clone();
    let mut groups = groups.iter().filter_map(Weak::upgrade);
    let Some(group) = groups.find(|group| group.deadline.is_over(group.now_ns())) else {
        return;
    };
    // Other ranks that are blocked send a notice, and so are not late.
    group.die(CollectiveError::Late {
        ranks: group.others().collect(),
        operation: "all-reduce",
        sequence: group.entered.load(Ordering::SeqCst),
        bucket: None,
        timeout_ms: u64::try_from(group.timeout.get().as_millis()).unwrap_or(u64::MAX),
    })
}
