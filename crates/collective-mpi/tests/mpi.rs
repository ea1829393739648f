//! The collectives between processes. Every rank runs this program's tests one after the other:
//! `mpirun -n 3 mpi --test-threads=1`, which `cargo xtask mpi` does. Alone it is a world of one.

#[path = "mpi/faults.rs"]
mod faults;
#[path = "mpi/mismatches.rs"]
mod mismatches;
#[path = "../../../tests/collective/numbers.rs"]
mod numbers;
#[path = "../../../tests/collective/operations.rs"]
mod operations;
#[path = "../../../tests/collective/perturbed.rs"]
mod perturbed;
#[path = "mpi/same_bits.rs"]
mod same_bits;
#[path = "../../../tests/collective/scenarios.rs"]
mod scenarios;
#[path = "mpi/streams.rs"]
mod streams;
#[path = "mpi/worlds.rs"]
mod worlds;
/// Sorted behind all others: tests run in the order of their names.
#[path = "mpi/zz_leave.rs"]
mod zz_leave;
