//! What the examples share.

use std::error::Error;
use std::fmt::Debug;

use fusestep_collective::{CollectiveError, Options, ThreadCommunicator, run_ranks};

/// Runs `body` on every rank of a world of threads, prints what each returns and hands it back in
/// rank order.
pub(crate) fn on_ranks<R: Debug + Send>(
    title: &str,
    world_size: usize,
    body: impl Fn(ThreadCommunicator) -> Result<R, CollectiveError> + Sync,
) -> Result<Vec<R>, Box<dyn Error>> {
    let mut results = Vec::new();
    for outcome in run_ranks(world_size, &Options::default(), body)? {
        results.push(outcome.map_err(|_| "a rank panicked")??);
    }
    println!("{title}");
    for (rank, result) in results.iter().enumerate() {
        println!("    rank {rank}: {result:?}");
    }
    Ok(results)
}
