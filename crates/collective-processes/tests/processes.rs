//! The collectives between processes. This program starts itself as the ranks of worlds of several
//! sizes, and each rank runs the tests below one after the other; alone it is a world of one.

#[path = "../../collective-mpi/tests/mpi/faults.rs"]
mod faults;
#[path = "../../collective-mpi/tests/mpi/mismatches.rs"]
mod mismatches;
#[path = "../../../tests/collective/numbers.rs"]
mod numbers;
#[path = "../../../tests/collective/operations.rs"]
mod operations;
#[path = "../../../tests/collective/perturbed.rs"]
mod perturbed;
#[path = "../../collective-mpi/tests/mpi/same_bits.rs"]
mod same_bits;
#[path = "../../../tests/collective/scenarios.rs"]
mod scenarios;
#[path = "processes/shared.rs"]
mod shared;
#[path = "processes/start.rs"]
mod start;
#[path = "../../collective-mpi/tests/mpi/streams.rs"]
mod streams;
#[path = "processes/worlds.rs"]
mod worlds;

use std::time::Duration;

/// Everything else in this program, as so many ranks.
fn everything(ranks: usize) {
    if start::is_rank() {
        return;
    }
    let arguments = ["--test-threads=1", "--color=never", "--skip=all_tests_pass"];
    let session = start::session("suite");
    let mut started = start::ranks(ranks, &session, &arguments, &[]);
    for rank in started.wait(Duration::from_secs(300)) {
        assert!(rank.is_success, "{ranks} ranks:\n{}", rank.output);
        assert!(rank.output.contains("test result: ok"), "{}", rank.output);
    }
    assert_eq!(start::left_behind(), Vec::<String>::new());
}

#[test]
fn all_tests_pass_on_2_ranks() {
    everything(2);
}

#[test]
fn all_tests_pass_on_3_ranks() {
    everything(3);
}

#[test]
fn all_tests_pass_on_4_ranks() {
    everything(4);
}

#[test]
fn all_tests_pass_on_5_ranks() {
    everything(5);
}
