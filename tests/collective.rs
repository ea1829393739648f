//! The collectives between ranks that are threads, and in a world of one.

#[path = "collective/faults.rs"]
mod faults;
#[path = "collective/mismatches.rs"]
mod mismatches;
#[path = "collective/numbers.rs"]
mod numbers;
#[path = "collective/operations.rs"]
mod operations;
#[path = "collective/rings.rs"]
mod rings;
#[path = "collective/worlds.rs"]
mod worlds;
