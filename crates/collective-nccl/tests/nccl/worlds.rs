//! Groups of ranks with a GPU each.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};

/// One test at a time: faults of the stand-in are the whole process's.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The libraries under test; by default those of the system.
pub(crate) fn options() -> NcclOptions {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let defaults = NcclOptions::default();
    NcclOptions {
        nccl_library: path("FUSESTEP_NCCL_LIBRARY").unwrap_or(defaults.nccl_library),
        driver_library: path("FUSESTEP_CUDA_LIBRARY").unwrap_or(defaults.driver_library),
        // So little that the longer calls of tests pass through it in segments.
        scratch_bytes: 500_000,
        ..NcclOptions::default()
    }
}

/// The GPUs there are, which bound the worlds.
fn gpus() -> usize {
    let count = std::env::var("FUSESTEP_EMULATOR_DEVICES");
    count.map_or(1, |text| text.parse().unwrap())
}

/// The sizes of worlds that there can be.
pub(crate) fn sizes() -> Vec<usize> {
    (1..=gpus()).collect()
}

/// Runs `body` on every rank of a new group; results and panics in rank order.
pub(crate) fn outcomes<R: Send>(
    ranks: usize,
    options: &NcclOptions,
    body: impl Fn(NcclCommunicator) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    let control = Options { timeout: options.timeout, ..Options::default() };
    run_ranks(ranks, &control, |control| {
        let gpu = control.rank();
        body(NcclCommunicator::new(Box::new(control), gpu, options).unwrap())
    })
    .unwrap()
}

/// As above, without panics.
pub(crate) fn group<R: Send>(
    ranks: usize,
    options: &NcclOptions,
    body: impl Fn(NcclCommunicator) -> R + Sync,
) -> Vec<R> {
    let rethrow = |outcome: std::thread::Result<R>| {
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    };
    let outcomes = outcomes(ranks, options, body);
    outcomes.into_iter().map(rethrow).collect()
}

/// Runs `body` on every rank, if there are GPUs enough.
pub(crate) fn world<R: Send>(
    ranks: usize,
    body: impl Fn(&mut dyn Communicator) -> R + Sync,
) -> Vec<R> {
    if ranks > gpus() {
        return Vec::new();
    }
    let _turn = turn();
    group(ranks, &options(), |mut comm| body(&mut comm))
}

/// A deadline for tests that let it pass.
pub(crate) const SHORT: Duration = Duration::from_millis(1000);

/// Options with that deadline.
pub(crate) fn short() -> NcclOptions {
    NcclOptions { timeout: SHORT, ..options() }
}

/// Fails the test if `body` does not end in time: the watchdog lies outside of the code that is
/// tested.
pub(crate) fn within<R: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // The receiver is gone only if the watchdog has fired.
        let _ = sender.send(body());
    });
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a body that returned has sent its result"),
        },
    }
}
