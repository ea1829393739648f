//! The step of many ranks: the same bits however it is shared out.

#[path = "distributed/checkpoints.rs"]
mod checkpoints;
#[path = "distributed/groups.rs"]
mod groups;
#[path = "distributed/laws.rs"]
mod laws;
#[path = "distributed/merging.rs"]
mod merging;
#[path = "distributed/open_runs.rs"]
mod open_runs;
#[path = "distributed/plans.rs"]
mod plans;
#[path = "distributed/predictions.rs"]
mod predictions;
#[path = "distributed/prefetch.rs"]
mod prefetch;
#[path = "distributed/rounding.rs"]
mod rounding;
#[path = "distributed/run.rs"]
mod run;
#[path = "distributed/slices.rs"]
mod slices;
