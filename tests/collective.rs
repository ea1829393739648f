//! The collectives between ranks that are threads, and in a world of one.

#[path = "collective/claims.rs"]
mod claims;
#[path = "collective/faults.rs"]
mod faults;
#[path = "collective/mismatches.rs"]
mod mismatches;
#[path = "collective/numbers.rs"]
mod numbers;
#[path = "collective/operations.rs"]
mod operations;
#[path = "collective/perturbed.rs"]
mod perturbed;
#[path = "collective/scenarios.rs"]
mod scenarios;
#[path = "collective/streams.rs"]
mod streams;
#[path = "collective/trees.rs"]
mod trees;
#[path = "collective/worlds.rs"]
mod worlds;
