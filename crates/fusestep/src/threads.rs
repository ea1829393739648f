//! Ranks as threads of this process.

use fusestep_collective::{CollectiveError, Communicator, Options, run_ranks};
use fusestep_planner::PlanError;

use crate::Error;

/// Runs `body` on `ranks` ranks, each a thread, and returns their results in rank order.
///
/// # Errors
/// The error of the first rank that has failed by itself; errors of other ranks then only name that
/// rank. Zero `ranks`. A thread that cannot be started.
pub fn threads<R: Send>(
    ranks: usize,
    body: impl Fn(&mut dyn Communicator) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let outcomes = run_ranks(ranks, &Options::default(), |mut comm| body(&mut comm))?;
    let (mut found, mut failed) = (Vec::with_capacity(ranks), None::<Error>);
    for outcome in outcomes {
        match outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            Ok(value) => found.push(value),
            Err(error) if failed.as_ref().is_none_or(of_others) => failed = Some(error),
            Err(_) => {}
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(found),
    }
}

/// Whether an error is one of a call between ranks, which may only mean that another rank has
/// failed.
fn of_others(error: &Error) -> bool {
    let planned = error.downcast_ref::<PlanError>();
    matches!(planned, Some(PlanError::Collective(_))) || error.is::<CollectiveError>()
}
