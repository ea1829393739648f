//! Sums along lanes between devices: the bits of one rank on the host.

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_lars_momentum::Lars;
use fusestep_planner::{Accumulated, ZeroStage};

use crate::counted::Counted;
use crate::lane_case::{End, LaneCase};
use crate::run::{Case, Mixed};
use crate::worlds::{STAGES, on_each, worlds};

fn assert_same(case: &LaneCase, expected: &End) {
    for (rank, found) in on_each(case.case.world, |comm, backend| case.rank_on(comm, backend))
        .into_iter()
        .enumerate()
    {
        assert!(found == *expected, "rank {rank} ends otherwise: {case:?}");
    }
}

fn on_worlds(case: &LaneCase) {
    let expected = case.on(1);
    for world in worlds().filter(|&world| world <= case.lanes as usize) {
        for zero in STAGES {
            for streams in [0, 2] {
                let mut other = case.clone();
                other.case = Case { world, zero, streams, ..other.case };
                assert_same(&other, &expected);
            }
        }
    }
}

#[test]
fn any_number_of_devices_ends_with_the_bits_of_one_rank() {
    for (lanes, of_lane) in [(4, 1), (6, 1), (5, 2), (8, 1)] {
        on_worlds(&LaneCase { lanes, of_lane, ..LaneCase::default() });
    }
}

#[test]
fn weights_short_windows_and_missing_gradients_are_the_host_s() {
    for (lanes, accumulated) in [(4, Accumulated::Mean), (7, Accumulated::Sum)] {
        let mut case = LaneCase {
            lanes,
            accumulated,
            weighted: accumulated == Accumulated::Mean,
            last: Some(3),
            without_gradient: |update, micro_batch, param| {
                param == 4 && micro_batch != 1 || param == 2 && update == 1
            },
            ..LaneCase::default()
        };
        case.case.clip = Some(0.5);
        on_worlds(&case);
    }
}

#[test]
fn gradients_of_sixteen_bits_and_rules_with_norms_follow_lanes_on_devices() {
    for lanes in [4, 6] {
        let mut case = LaneCase { lanes, ..LaneCase::default() };
        case.case.mixed = Mixed::Yes;
        case.case.rule = Lars::default().into();
        on_worlds(&case);
    }
}

#[test]
fn devices_whose_engine_works_on_the_host_add_the_same_sums() {
    for (lanes, mixed) in [(4, Mixed::No), (6, Mixed::Yes)] {
        let mut case = LaneCase { lanes, ..LaneCase::default() };
        case.case.mixed = mixed;
        let expected = case.on(1);
        for world in worlds().skip(1) {
            for zero in [ZeroStage::None, ZeroStage::Two] {
                let mut other = case.clone();
                other.case = Case { world, zero, streams: world % 2, ..other.case };
                let ranks = run_ranks(world, &Options::default(), |mut comm| {
                    let backend = Counted::open(comm.rank());
                    other.rank_on(&mut comm, &backend)
                });
                for (rank, found) in ranks.unwrap().into_iter().enumerate() {
                    assert!(found.unwrap() == expected, "rank {rank}: {other:?}");
                }
            }
        }
    }
}
