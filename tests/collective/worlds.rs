//! Groups of ranks for tests, watched from outside.

use std::sync::mpsc;
use std::time::Duration;

use fusestep_collective::{Communicator, Options, Solo, ThreadCommunicator, run_ranks};

/// The sizes of worlds that there can be.
pub(crate) fn sizes() -> Vec<usize> {
    vec![1, 2, 3, 4, 5, 8]
}

/// Runs `body` on every rank of a world, of one also as [`Solo`]; a panic of any rank is the
/// test's. Ranks claim little at a time, so that buffers need not be long to be reduced in turns.
pub(crate) fn world<R: Send>(
    ranks: usize,
    body: impl Fn(&mut dyn Communicator) -> R + Sync,
) -> Vec<R> {
    if ranks == 1 {
        body(&mut Solo::new());
    }
    let options = Options { claim_bytes: 4 << 10, ..Options::default() };
    world_with(ranks, &options, body)
}

/// Runs `body` on every rank of a group of threads; a panic of any rank is the test's.
pub(crate) fn world_with<R: Send>(
    ranks: usize,
    options: &Options,
    body: impl Fn(&mut dyn Communicator) -> R + Sync,
) -> Vec<R> {
    all(run_ranks(ranks, options, |mut comm| body(&mut comm)).unwrap())
}

/// Runs `body` on threads with a timeout of so many milliseconds.
pub(crate) fn threads<R: Send>(
    ranks: usize,
    timeout_ms: u64,
    body: impl Fn(ThreadCommunicator) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    let options = Options { timeout: Duration::from_millis(timeout_ms), ..Options::default() };
    run_ranks(ranks, &options, body).unwrap()
}

/// What the ranks returned; rethrows the first panic.
pub(crate) fn all<R>(outcomes: Vec<std::thread::Result<R>>) -> Vec<R> {
    let rethrow = |outcome: std::thread::Result<R>| {
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    };
    outcomes.into_iter().map(rethrow).collect()
}

/// Fails the test if `body` does not end in time: the watchdog lies outside of the code that is
/// tested.
pub(crate) fn within<R: Send + 'static>(
    seconds: u64,
    body: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // The receiver is gone only if the watchdog has fired.
        let _ = sender.send(body());
    });
    match receiver.recv_timeout(Duration::from_secs(seconds)) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a body that returned has sent its result"),
        },
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {seconds} s"),
    }
}
