//! Same bits at every stage, with any buckets and communication streams.

use std::num::NonZeroUsize;

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{Comms, Ownership, PlanError, Run, Topology, ZeroStage};
use fusestep_tensor::Role;
use fusestep_testkit::each_rule;

use crate::run::{Case, Measured, Mixed, whole_params};

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

fn assert_same(case: &Case, expected: &crate::run::Outcome) {
    let found = case.run();
    assert!(found.params == expected.params, "other parameters: {case:?}");
    for (found, expected) in found.reports.iter().zip(&expected.reports) {
        assert_eq!(found.skipped, expected.skipped, "{case:?}");
        assert_eq!(
            found.grad_norm.map(f64::to_bits),
            expected.grad_norm.map(f64::to_bits),
            "{case:?}"
        );
        assert_eq!(
            found.update_norm.map(f64::to_bits),
            expected.update_norm.map(f64::to_bits),
            "{case:?}"
        );
        assert_eq!(found.without_gradient, expected.without_gradient, "{case:?}");
    }
    assert_eq!(found.update_norms, expected.update_norms, "{case:?}");
}

fn same_at_every_stage(base: &Case, expected: &crate::run::Outcome) {
    for zero in STAGES {
        let case = Case { zero, ..base.clone() };
        assert_same(&case, expected);
    }
}

#[test]
fn every_stage_and_world_gives_the_bits_of_a_mean_taken_by_hand() {
    for world in 1..=5 {
        let base = Case { world, ..Case::default() };
        let expected = base.by_hand();
        same_at_every_stage(&base, &expected);
    }
}

#[test]
fn buckets_streams_and_the_lack_of_them_change_no_bit() {
    let base = Case { world: 3, steps: 2, ..Case::default() };
    let expected = base.by_hand();
    for zero in STAGES {
        for (cap, streams) in [
            (None, 0),
            (None, 2),
            (Some(1), 0),
            (Some(4_000), 1),
            (Some(1 << 30), 2),
            (Some(65_536), 3),
        ] {
            // A cap of 1 byte means one element each: too many calls for large tensors.
            let numels = match cap {
                Some(1) => vec![5, 1, 3],
                _ => base.numels.clone(),
            };
            let case = Case { zero, cap, streams, numels, ..base.clone() };
            match cap {
                Some(1) => assert_same(&case, &case.by_hand()),
                _ => assert_same(&case, &expected),
            }
        }
    }
}

#[test]
fn every_rule_clipped_gives_its_unsharded_bits() {
    for rule in each_rule() {
        for clip in [None, Some(0.5)] {
            let base = Case { rule, clip, world: 3, steps: 2, ..Case::default() };
            let expected = base.by_hand();
            for zero in STAGES {
                assert_same(&Case { zero, streams: 1, ..base.clone() }, &expected);
            }
        }
    }
}

#[test]
fn chunks_that_lie_in_many_shards_are_summed_as_one() {
    for world in 2..=5 {
        let numels = vec![9, 200_000, 1, 65_536, 65_537, 2];
        let base = Case { numels, world, steps: 1, clip: Some(1e-3), ..Case::default() };
        let expected = base.by_hand();
        for zero in STAGES {
            for ownership in [Ownership::Elements, Ownership::Tensors] {
                assert_same(&Case { zero, ownership, ..base.clone() }, &expected);
            }
        }
    }
}

#[test]
fn norms_of_updates_are_those_of_one_rank() {
    for world in 1..=5 {
        for rule in each_rule() {
            let base = Case {
                rule,
                numels: vec![9, 200_000, 0, 1, 65_536, 65_537, 2],
                world,
                steps: 3,
                measured: Measured::Yes,
                clip: Some(0.5),
                // A step is skipped, and another leaves a parameter out.
                infinite: Some((world - 1, 1, 3)),
                without_gradient: (0..world).map(|rank| (rank, 2, 5)).collect(),
                ..Case::default()
            };
            let expected = base.by_hand();
            assert!(expected.reports[1].skipped && expected.reports[2].update_norm > Some(0.0));
            same_at_every_stage(&base, &expected);
        }
    }
    for (ownership, streams) in [(Ownership::Elements, 2), (Ownership::Tensors, 1)] {
        let base =
            Case { world: 3, measured: Measured::Yes, ownership, streams, ..Case::default() };
        same_at_every_stage(&base, &base.by_hand());
    }
}

#[test]
fn norms_of_updates_are_the_same_at_every_stage_in_mixed_dtypes_and_groups() {
    let base = Case {
        mixed: Mixed::Yes,
        world: 4,
        measured: Measured::Yes,
        precision: Some(Precision { master: Master::Remainder, ..Precision::default() }),
        ..Case::default()
    };
    same_at_every_stage(&base, &base.run());
    let group = NonZeroUsize::new(2);
    for zero in [ZeroStage::One, ZeroStage::Three] {
        let case =
            Case { mixed: Mixed::No, precision: None, shard_group: group, zero, ..base.clone() };
        assert_same(&case, &case.by_hand());
    }
}

#[test]
fn fewer_parameters_than_ranks_leave_some_shards_empty() {
    for numels in [vec![1], vec![2, 1], vec![0], vec![0, 3]] {
        for rule in each_rule() {
            let base =
                Case { rule, numels: numels.clone(), world: 5, clip: Some(0.1), ..Case::default() };
            let expected = base.by_hand();
            same_at_every_stage(&base, &expected);
        }
    }
}

#[test]
fn mixed_dtypes_give_the_same_bits_at_every_stage() {
    let base = Case { mixed: Mixed::Yes, world: 4, cap: None, clip: Some(0.5), ..Case::default() };
    let expected = base.run();
    for zero in STAGES {
        for cap in [None, Some(50_000)] {
            assert_same(&Case { zero, cap, ..base.clone() }, &expected);
        }
    }
}

#[test]
fn a_gradient_that_is_infinite_on_one_rank_skips_the_step_on_all() {
    let infinite = Some((2, 1, 4));
    let base = Case { world: 3, infinite, scaled: Some(1024.0), ..Case::default() };
    let expected = base.by_hand();
    assert_eq!((expected.skipped, expected.reports[1].skipped), (1, true));
    for zero in STAGES {
        let case = Case { zero, ..base.clone() };
        assert_same(&case, &expected);
        assert_eq!(case.run().skipped, 1);
    }
}

#[test]
fn a_gradient_missing_on_one_rank_is_zero_there_and_one_missing_on_all_is_left_out() {
    let mut without_gradient = vec![(0, 0, 4), (2, 1, 0)];
    without_gradient.extend((0..3).map(|rank| (rank, 1, 5)));
    without_gradient.extend((0..8).map(|param| (1, 2, param)));
    let base = Case { world: 3, without_gradient, clip: Some(1.0), ..Case::default() };
    let expected = base.by_hand();
    assert_eq!(expected.reports[1].without_gradient, 1);
    for zero in STAGES {
        for streams in [0, 2] {
            let case = Case { zero, streams, ..base.clone() };
            assert_same(&case, &expected);
        }
    }
}

#[test]
fn with_streams_a_full_bucket_starts_before_the_last_gradient_is_given() {
    let case =
        Case { world: 2, streams: 2, cap: Some(1_000), numels: vec![200; 6], ..Case::default() };
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let rank = comm.rank();
        let mut comms = Comms::with_streams(&mut comm, 2).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        let mut started = Vec::new();
        for param in (0..6).rev() {
            let bytes = case.gradient(rank, 0, param);
            let name = &plan.params()[param].name;
            Run::of(&plan, &mut state, &backend, &mut comms).push_grad(name, &bytes).unwrap();
            started.push(state.segments_started());
        }
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        let twice = run.push_grad(&plan.params()[0].name, &case.gradient(rank, 0, 0));
        assert!(matches!(twice, Err(PlanError::GradientTwice { .. })));
        run.step().unwrap();
        started
    });
    for started in outcomes.unwrap() {
        assert_eq!(started.unwrap(), [1, 2, 3, 4, 5, 6]);
    }
}

#[test]
fn parameters_broadcast_by_their_owners_have_the_bits_of_gathered_ones() {
    for rule in [Adam::default().into(), Lars::default().into()] {
        for (ownership, zero) in
            [(Ownership::Tensors, ZeroStage::Two), (Ownership::Tensors, ZeroStage::One)]
        {
            let case =
                Case { rule, world: 3, zero, ownership, mixed: Mixed::Yes, ..Case::default() };
            let expected = case.run();
            for cap in [1, 300_000, 1 << 30] {
                let fused = Case { broadcast_cap: Some(cap), ..case.clone() };
                assert!(fused.run().params == expected.params, "{fused:?}");
            }
        }
    }
}

#[test]
fn parameters_of_one_rank_come_to_all() {
    for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        let case = Case { world: 3, zero, cap: Some(1_000), ..Case::default() };
        let outcomes = run_ranks(3, &Options::default(), |mut comm| {
            let plan = case.planner().plan_for(&case.params(), Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let rank = comm.rank();
            let mut comms = Comms::direct(&mut comm);
            let mut state = plan.allocate(&backend).unwrap();
            for (param, desc) in plan.params().iter().enumerate() {
                if rank == 1 {
                    state
                        .write(&backend, Role::Param, &desc.name, &case.first_values(param))
                        .unwrap();
                }
            }
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            run.broadcast_parameters(1).unwrap();
            whole_params(&mut run)
        });
        let expected: Vec<Vec<u8>> =
            (0..case.numels.len()).map(|param| case.first_values(param)).collect();
        for params in outcomes.unwrap() {
            assert!(params.unwrap() == expected, "{zero:?}");
        }
    }
}

#[test]
fn buckets_that_are_through_give_their_memory_to_those_that_come() {
    let base = Case {
        numels: vec![1_000; 16],
        world: 2,
        cap: Some(4_000),
        zero: ZeroStage::Two,
        steps: 2,
        ..Case::default()
    };
    let expected = base.by_hand();
    for (zero, group, streams, all) in [
        (ZeroStage::One, None, 2, true),
        (ZeroStage::One, None, 0, true),
        (ZeroStage::Two, None, 2, false),
        (ZeroStage::Two, None, 0, false),
        (ZeroStage::Two, NonZeroUsize::new(1), 2, true),
        (ZeroStage::Two, NonZeroUsize::new(1), 0, true),
        (ZeroStage::Three, None, 2, false),
        (ZeroStage::Three, None, 0, false),
    ] {
        let case = Case { zero, shard_group: group, ..base.clone() };
        let peaks = run_ranks(2, &Options::default(), |mut comm| {
            let rank = comm.rank();
            let plan = case.planner().plan_for(&case.params(), Topology::of(&comm));
            let (plan, backend) = (plan.unwrap(), CpuBackend::new(NonZeroUsize::MIN));
            let mut comms = match group {
                Some(group) => Comms::in_groups(&mut comm, group, streams).unwrap(),
                None => Comms::with_streams(&mut comm, streams).unwrap(),
            };
            comms = comms.reducing_when_full();
            let mut state = plan.allocate(&backend).unwrap();
            for (param, desc) in plan.params().iter().enumerate() {
                let values = case.first_values(param);
                state.write(&backend, Role::Param, &desc.name, &values).unwrap();
            }
            let mut peaks = Vec::new();
            for step in 0..case.steps {
                let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                for param in (0..16).rev() {
                    let bytes = case.gradient(rank, step, param);
                    let name = &plan.params()[param].name;
                    run.push_grad(name, &bytes).unwrap();
                    // A backward pass that takes longer than the calls.
                    while !all && run.take_reduced().unwrap() > 0 {
                        std::thread::yield_now();
                    }
                }
                let report = run.step().unwrap();
                assert_eq!(state.memory_bytes(), plan.memory_bytes());
                peaks.push(report.segment_peak_bytes);
            }
            let params =
                crate::run::whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms));
            (peaks, params)
        });
        for outcome in peaks.unwrap() {
            let (peaks, params) = outcome.unwrap();
            // A gradient of 1,000 elements lies in a slot of 1,024.
            let bytes = if all { 16 * 4_096 } else { 4_096 };
            assert_eq!(peaks, [bytes; 2], "{zero:?} {group:?} {streams}");
            assert!(params == expected.params, "{zero:?} {group:?} {streams}");
        }
    }
}
