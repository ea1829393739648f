//! The step of many ranks: the same bits however it is shared out.

#[path = "distributed/laws.rs"]
mod laws;
#[path = "distributed/rounding.rs"]
mod rounding;
#[path = "distributed/run.rs"]
mod run;
