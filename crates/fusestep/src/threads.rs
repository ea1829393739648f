//! Ranks as threads of this process.

use fusestep_collective::{CollectiveError, Communicator, Options, run_ranks};
use fusestep_planner::PlanError;

use crate::Error;

/// Runs `body` on so many ranks, each a thread, and returns what they return, in rank order.
///
/// # Errors
/// That of the first rank with a reason of its own; others then only say that it has left. No
/// ranks, of which none would run `body`. A thread that cannot be started.
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

/// Whether an error says no more than that another rank has failed.
fn of_others(error: &Error) -> bool {
    let planned = error.downcast_ref::<PlanError>();
    matches!(planned, Some(PlanError::Collective(_))) || error.is::<CollectiveError>()
}
