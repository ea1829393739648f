//! Threads that look after ranks which cannot look after themselves: blocked within MPI, or about to be ended by the launcher.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use fusestep_collective::CollectiveError;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::group::Group;

/// Groups whose recorders are written when the launcher ends the job.
static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// Groups that are within a call of MPI which does not come back by itself.
static BLOCKED: Mutex<Vec<(u64, Weak<Group>, Instant)>> = Mutex::new(Vec::new());

static SIGNALS_WATCHED: AtomicBool = AtomicBool::new(false);
static CLOCK_WATCHED: AtomicBool = AtomicBool::new(false);

/// Looks after a new group.
pub(crate) fn register(group: &Arc<Group>) {
    if group.options.dump_folder.is_none() {
        return;
    }
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(group));
    drop(groups);
    if SIGNALS_WATCHED.swap(true, Ordering::SeqCst) {
        return;
    }
    // Without it the recorder is lost when the launcher ends the job; everything else works.
    if let Ok(mut signals) = Signals::new([SIGTERM]) {
        let watch = move || {
            for signal in signals.forever() {
                dump_all();
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        };
        let _ = std::thread::Builder::new()
            .name("mpi-signals".to_owned())
            .spawn(watch);
    }
}

fn dump_all() {
    let groups = GROUPS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
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

/// Writes the recorders of all groups but `reported`, which has written its own and said so.
pub(crate) fn dump_others(reported: &Group) {
    let groups = GROUPS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
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

/// Ends the watch over one call.
pub(crate) struct Watched(u64);

impl Drop for Watched {
    fn drop(&mut self) {
        BLOCKED
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|(id, _, _)| *id != self.0);
    }
}

/// Ends the job if the result is not dropped by `deadline`.
pub(crate) fn arm(group: &Arc<Group>, deadline: Instant) -> Watched {
    let mut blocked = BLOCKED.lock().unwrap_or_else(PoisonError::into_inner);
    let id = blocked
        .iter()
        .map(|(id, _, _)| *id)
        .max()
        .map_or(0, |id| id + 1);
    blocked.push((id, Arc::downgrade(group), deadline));
    drop(blocked);
    if !CLOCK_WATCHED.swap(true, Ordering::SeqCst) {
        let watch = || {
            loop {
                std::thread::sleep(Duration::from_millis(50));
                end_overdue();
            }
        };
        let _ = std::thread::Builder::new()
            .name("mpi-clock".to_owned())
            .spawn(watch);
    }
    Watched(id)
}

fn end_overdue() {
    let now = Instant::now();
    let blocked = BLOCKED.lock().unwrap_or_else(PoisonError::into_inner);
    let overdue = blocked.iter().find(|(_, _, deadline)| now > *deadline);
    let Some(group) = overdue.and_then(|(_, group, _)| group.upgrade()) else {
        return;
    };
    drop(blocked);
    // Those that are blocked, too, say so and are not late.
    group.die(CollectiveError::Late {
        ranks: group.others().collect(),
        operation: "all-reduce",
        sequence: group.entered.load(Ordering::SeqCst),
        bucket: None,
        timeout_ms: group.timeout_ms(),
    })
}
