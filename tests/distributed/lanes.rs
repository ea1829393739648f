//! Sums along lanes: the same bits at any number of ranks, however these share out a step.

use std::num::{NonZeroU32, NonZeroUsize};

use fusestep_collective::{Communicator, Link, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{
    Accumulated, Comms, Distributed, GradientAccumulation, Lanes, LocalSgd, Planner, ReducedWhen,
    Run, Topology, ZeroStage,
};
use fusestep_tensor::{DType, Role};

use crate::lane_case::LaneCase;
use crate::run::{Case, Measured, Mixed};

#[test]
fn any_number_of_ranks_ends_with_the_bits_of_one() {
    for (lanes, of_lane) in [(1, 1), (4, 1), (6, 1), (5, 2), (8, 3)] {
        let case = LaneCase { lanes, of_lane, ..LaneCase::default() };
        let worlds: Vec<usize> = (2..=5).filter(|&world| world <= lanes as usize).collect();
        let end = case.same_everywhere(&worlds);
        assert!(end.0 == case.by_hand(), "{lanes} lanes of {of_lane}");
    }
}

#[test]
fn twelve_lanes_are_the_same_on_one_to_twelve_ranks() {
    let case = LaneCase { lanes: 12, of_lane: 1, ..LaneCase::default() };
    let expected = case.on(1);
    for world in [2, 3, 4, 5, 6, 7, 12] {
        assert!(case.on(world) == expected, "{world} ranks");
    }
    // Another division into lanes is another sum.
    assert!(LaneCase { lanes: 4, of_lane: 3, ..case }.on(1).0 != expected.0);
}

#[test]
fn fused_in_backward_naive_and_in_views_it_is_the_same() {
    for lanes in [4, 6] {
        let case = LaneCase { lanes, ..LaneCase::default() };
        let expected = case.on(1);
        for world in [1, 2, 3, 4] {
            for fused in [false, true] {
                for in_backward in [false, true] {
                    for views in [false, true] {
                        let mut other = LaneCase { fused, in_backward, views, ..case.clone() };
                        assert!(other.on(world) == expected, "{world} ranks: {other:?}");
                        other.case.zero = ZeroStage::One;
                        assert!(other.on(world) == expected, "{world} ranks: {other:?}");
                        other.case.streams = 2;
                        other.case.zero = ZeroStage::Two;
                        assert!(other.on(world) == expected, "{world} ranks: {other:?}");
                    }
                }
            }
            let mut naive = case.clone();
            naive.case.cap = None;
            assert!(naive.on(world) == expected, "{world} ranks, naive");
        }
    }
}

#[test]
fn gradients_that_some_micro_batches_lack_leave_sums_as_they_are() {
    let lacking = |update, micro_batch, param| match param {
        0 => micro_batch % 2 == 0,
        1 => update == 0 && micro_batch < 5,
        4 => micro_batch == 5,
        5 => update == 1,
        _ => false,
    };
    for of_lane in [1, 2] {
        let case = LaneCase { of_lane, without_gradient: lacking, ..LaneCase::default() };
        let end = case.same_everywhere(&[2, 3, 4]);
        assert!(end.0 == case.by_hand());
        assert_eq!(end.1[1].2, 1);
    }
}

#[test]
fn weights_and_short_windows_count_as_they_were_given() {
    for weighted in [false, true] {
        let case = LaneCase { of_lane: 2, weighted, ..LaneCase::default() };
        assert!(case.same_everywhere(&[2, 4]).0 == case.by_hand());
        for last in [1, 3, 7, 11] {
            let case = LaneCase { last: Some(last), ..case.clone() };
            let expected = case.same_everywhere(&[2, 3, 5]);
            for (in_backward, fused) in [(true, false), (true, true), (false, true)] {
                let mut other = LaneCase { in_backward, fused, ..case.clone() };
                other.case.zero = ZeroStage::One;
                assert!(other.on(4) == expected && other.on(1) == expected, "{other:?}");
            }
            // Cut short, where nothing is reduced before the step.
            for world in [1, 3, 5] {
                let other = LaneCase { announced: false, ..case.clone() };
                assert!(other.on(world) == expected, "{world} ranks: {other:?}");
            }
        }
        let one_each = LaneCase { lanes: 4, of_lane: 1, last: Some(2), weighted, ..case.clone() };
        one_each.same_everywhere(&[2, 4]);
        let views = LaneCase { views: true, ..one_each };
        views.same_everywhere(&[2, 4]);
    }
    let sums = LaneCase { accumulated: Accumulated::Sum, ..LaneCase::default() };
    assert!(sums.same_everywhere(&[2, 4]).0 == sums.by_hand());
}

#[test]
fn sixteen_bits_norms_and_layer_wise_rules_are_the_same() {
    let masters = Precision { master: Master::F32, ..Precision::default() };
    for rule in [Adam::default().into(), Lars::default().into(), Lamb::default().into()] {
        for precision in [None, Some(masters)] {
            let case = Case {
                rule,
                mixed: Mixed::Yes,
                precision,
                clip: Some(0.5),
                scaled: Some(64.0),
                measured: Measured::Yes,
                numels: vec![3_001, 2_049, 0, 1, 1_024, 17],
                steps: 2,
                ..Case::default()
            };
            for (lanes, of_lane) in [(4, 1), (6, 2)] {
                let case = LaneCase { case: case.clone(), lanes, of_lane, ..LaneCase::default() };
                let expected = case.on(1);
                for world in [2, 3, 4] {
                    for zero in [ZeroStage::None, ZeroStage::Two, ZeroStage::Three] {
                        let mut other = case.clone();
                        other.case.zero = zero;
                        assert!(other.on(world) == expected, "{world} ranks: {other:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn state_in_int8_reads_the_sums_in_f32() {
    for rule in [Adam::default().into(), Lars::default().into(), Lamb::default().into()] {
        for master in [Master::None, Master::F32, Master::Remainder8] {
            let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
            let case = Case {
                rule,
                mixed: Mixed::Yes,
                precision: Some(precision),
                numels: vec![5_003, 4_097, 0, 1, 4_096, 17],
                steps: 2,
                ..Case::default()
            };
            let case = LaneCase { case, lanes: 6, of_lane: 1, ..LaneCase::default() };
            let expected = case.on(1);
            for world in [2, 4] {
                for zero in [ZeroStage::None, ZeroStage::Two, ZeroStage::Three] {
                    let mut other = case.clone();
                    other.case.zero = zero;
                    assert!(other.on(world) == expected, "{world} ranks: {other:?}");
                }
            }
        }
    }
    let precision = Some(Precision { state: StateDType::Int8, ..Precision::default() });
    let case = Case { mixed: Mixed::Yes, precision, numels: vec![5_003], ..Case::default() };
    let lanes = LaneCase { case, ..LaneCase::default() };
    let plan = lanes.planner().plan(&lanes.case.params()).unwrap();
    for spec in plan.storages() {
        let grads = spec.lists.iter().filter(|list| list.role == Role::Grad);
        grads.for_each(|list| assert_eq!(list.dtype, DType::F32, "{list:?}"));
    }
}

#[test]
fn shard_groups_change_nothing() {
    for lanes in [4, 6] {
        let case = LaneCase { lanes, ..LaneCase::default() };
        let expected = case.on(1);
        for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            for streams in [0, 2] {
                let mut other = case.clone();
                other.case.shard_group = NonZeroUsize::new(2);
                (other.case.zero, other.case.streams) = (zero, streams);
                assert!(other.on(4) == expected, "{other:?}");
            }
        }
    }
}

#[test]
fn what_follows_the_number_of_ranks_is_refused() {
    let params = LaneCase::default().case.params();
    let lanes = || Lanes::new(NonZeroU32::new(4).unwrap());
    let every = NonZeroU32::new(2).unwrap();
    let planner = || Planner::new(Adam::default().into()).with(lanes());
    let refused = |planner: Planner, world| {
        planner.plan_for(&params, Topology::new(0, world).unwrap()).unwrap_err().to_string()
    };
    let error = refused(planner(), 5);
    assert!(error.contains("at most 4 ranks") && error.contains('5'), "{error}");
    let local = LocalSgd::every(std::num::NonZeroU64::new(2).unwrap());
    assert!(refused(planner().with(local), 2).contains("lanes"));
    let each = GradientAccumulation::every(every).reduced(ReducedWhen::PerMicroStep);
    assert!(refused(planner().with(each), 2).contains("each micro-step"));
    let slices = Distributed::params(["layer0.weight0"]);
    assert!(refused(planner().with(slices), 2).contains("slice"));
    assert!(refused(planner().with(lanes()), 2).contains("lanes"));
    // More than a schedule holds.
    let many = Lanes::new(NonZeroU32::new(1 << 11).unwrap());
    let each = |count| GradientAccumulation::every(NonZeroU32::new(count).unwrap());
    let of_many = |count| Planner::new(Adam::default().into()).with(many).with(each(count));
    assert!(of_many(1 << 9).plan(&params).is_ok());
    let error = refused(of_many((1 << 9) + 1), 1);
    assert!(error.contains("at most 1,048,576") && error.contains("1050624"), "{error}");
}

#[test]
fn windows_of_a_wrong_number_of_micro_batches_are_refused() {
    let case = LaneCase::default();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let refused = |plan: &fusestep_planner::Plan, count| {
        let mut state = plan.allocate(&backend).unwrap();
        state.set_micro_batches(count).unwrap_err().to_string()
    };
    let plan = case.planner().plan(&case.case.params()).unwrap();
    assert!(refused(&plan, 0).contains("expected 1 to 6, which the plan has, found 0"));
    assert!(refused(&plan, 7).contains("expected 1 to 6, which the plan has, found 7"));
    let plain = case.case.planner().plan(&case.case.params()).unwrap();
    assert!(refused(&plain, 1).contains("expected a plan with lanes"));
    let mut state = plan.allocate(&backend).unwrap();
    let mut comms = Comms::alone();
    let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
    case.give(&mut run, 0, 0, 0);
    let error = run.state_mut().set_micro_batches(3).unwrap_err().to_string();
    assert!(error.contains("before the first gradient"), "{error}");
}

#[test]
fn ranks_that_say_other_numbers_of_micro_batches_all_hear_of_it() {
    let case = LaneCase { lanes: 4, ..LaneCase::default() };
    let told = run_ranks(2, &Options::default(), |mut comm| {
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let plan = case.planner().plan_for(&case.case.params(), Topology::of(&comm)).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        let rank = comm.rank();
        let mut comms = Comms::direct(&mut comm);
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        run.state_mut().set_micro_batches(if rank == 0 { 3 } else { 4 }).unwrap();
        loop {
            let micro_batch = run.state().micro_batch().unwrap();
            case.give(&mut run, 0, micro_batch, rank);
            match run.step() {
                Ok(report) => assert_eq!(report.update, None),
                Err(error) => return error.to_string(),
            }
        }
    });
    for told in told.unwrap() {
        let told = told.unwrap();
        assert!(told.contains("micro-batches of the update on all ranks"), "{told}");
    }
}

#[test]
fn the_worst_rank_keeps_what_the_one_with_most_sums_does() {
    for lanes in [4, 6, 12, 13] {
        for world in 2..=4 {
            for zero in [ZeroStage::None, ZeroStage::Two] {
                let mut case = LaneCase { lanes, ..LaneCase::default() };
                case.case.zero = zero;
                let plan = |rank| {
                    let topology = Topology::new(rank, world).unwrap();
                    case.planner().plan_for(&case.case.params(), topology).unwrap()
                };
                let worst = (0..world).map(|rank| plan(rank).memory_bytes()).max().unwrap();
                let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
                let told = plan(0).rank_summary(link).worst_rank.memory_bytes;
                assert_eq!(told, worst, "{world} ranks: {case:?}");
            }
        }
    }
}
