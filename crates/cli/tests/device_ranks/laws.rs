//! Ranks on devices end with the bits of ranks that are threads on the host.

use std::num::{NonZeroU64, NonZeroUsize};

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{LocalSgd, Optimizer, ReduceDType, ReducedWhen};

use crate::counted::Counted;
use crate::run::{Case, Mixed, Outcome, lacking};
use crate::worlds::{STAGES, gpus, on_each, small, worlds};

/// The case on so many devices; what each rank ends with, and the bytes that it has read from its
/// device and written there.
fn on_devices(case: &Case) -> Vec<(Outcome, (u64, u64))> {
    on_each(case.world, |comm, backend| {
        let outcome = case.rank(comm, backend);
        (outcome, backend.bytes())
    })
}

/// Every rank's parameters and reports are those of threads on the host.
pub(crate) fn assert_same(case: &Case) {
    let expected = case.run();
    for (rank, (found, _)) in on_devices(case).into_iter().enumerate() {
        assert!(found.params == expected.params, "rank {rank}: other parameters: {case:?}");
        assert_eq!(found.skipped, expected.skipped, "{case:?}");
        for (found, expected) in found.reports.iter().zip(&expected.reports) {
            let alike = |report: &fusestep_planner::StepReport| {
                (
                    report.step,
                    report.skipped,
                    report.without_gradient,
                    report.grad_norm.map(f64::to_bits),
                )
            };
            assert_eq!(alike(found), alike(expected), "rank {rank}: {case:?}");
        }
    }
}

#[test]
fn every_stage_and_world_gives_the_bits_of_threads_on_the_host() {
    for world in worlds() {
        for zero in STAGES {
            for streams in [0, 2] {
                assert_same(&Case { world, zero, streams, ..small() });
            }
        }
    }
}

#[test]
fn shards_of_groups_are_averaged_over_groups() {
    if gpus() < 4 {
        return;
    }
    for zero in STAGES.into_iter().skip(1) {
        for (streams, clip) in [(0, None), (2, Some(0.5))] {
            assert_same(&Case {
                world: 4,
                zero,
                shard_group: NonZeroUsize::new(2),
                streams,
                clip,
                ..small()
            });
        }
    }
}

#[test]
fn clipping_and_loss_scales_see_the_gradients_of_all_ranks() {
    for world in worlds().skip(1) {
        for zero in STAGES {
            let infinite = Case {
                world,
                zero,
                streams: 1,
                clip: Some(0.5),
                scaled: Some(1024.0),
                infinite: Some((world - 1, 1, 5)),
                steps: 3,
                ..small()
            };
            assert_same(&infinite);
            // Leaves of some tensors are nobody's, one in the midst of a bucket.
            assert_same(&Case { infinite: None, without_gradient: lacking(world, 1), ..infinite });
        }
    }
}

#[test]
fn rules_with_norms_sum_up_tensors_that_lie_in_many_shards() {
    let rules: [Optimizer; 2] = [Lars::default().into(), Lamb::default().into()];
    for rule in rules {
        for world in worlds().skip(1) {
            for (zero, clip) in STAGES.into_iter().zip([None, Some(0.5)].into_iter().cycle()) {
                assert_same(&Case { rule, world, zero, clip, ..small() });
            }
        }
    }
}

#[test]
fn micro_steps_add_up_before_and_behind_the_reduction() {
    for world in worlds().skip(1) {
        for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
            for zero in STAGES {
                assert_same(&Case {
                    world,
                    zero,
                    reduced,
                    merge: 2,
                    streams: 1,
                    mixed: Mixed::Yes,
                    without_gradient: lacking(world, 2),
                    ..small()
                });
            }
        }
    }
}

#[test]
fn averages_of_parameters_are_taken_on_the_device() {
    let masters = Precision { master: Master::F32, ..Precision::default() };
    for (mixed, precision) in [(Mixed::No, None), (Mixed::Yes, Some(masters))] {
        for world in worlds().skip(1) {
            assert_same(&Case {
                rule: Sgd::default().into(),
                world,
                mixed,
                precision,
                local_sgd: Some(LocalSgd::every(NonZeroU64::new(2).unwrap())),
                steps: 5,
                ..small()
            });
        }
    }
}

#[test]
fn ranks_whose_engine_works_on_the_host_take_gradients_there_and_back() {
    for world in worlds().skip(1) {
        for (zero, merge) in STAGES.into_iter().zip([1, 2].into_iter().cycle()) {
            let case = Case { world, zero, merge, streams: world % 2, clip: Some(0.5), ..small() };
            let expected = case.run();
            let ranks = run_ranks(world, &Options::default(), |mut comm| {
                let backend = Counted::open(comm.rank());
                case.rank(&mut comm, &backend).params
            });
            for (rank, found) in ranks.unwrap().into_iter().enumerate() {
                assert!(found.unwrap() == expected.params, "rank {rank}: {case:?}");
            }
        }
    }
}

#[test]
fn gradients_do_not_pass_through_the_host() {
    let world = gpus().min(3);
    if world == 1 {
        return;
    }
    let merges =
        [(1, ReducedWhen::PerWindow), (2, ReducedWhen::PerWindow), (2, ReducedWhen::PerMicroStep)];
    for (zero, (merge, reduced)) in STAGES.into_iter().flat_map(|z| merges.map(|m| (z, m))) {
        let rules: [(Optimizer, _, _); 4] = [
            (Adam::default().into(), None, 0),
            (Adam::default().into(), Some(0.5), 2),
            (Lars::default().into(), Some(0.5), 0),
            (Lamb::default().into(), None, 2),
        ];
        for (rule, clip, streams) in rules {
            let case = Case { rule, world, zero, clip, streams, merge, reduced, ..small() };
            let few = on_devices(&case);
            let many = on_devices(&Case { steps: case.steps + 10, ..case.clone() });
            let given: u64 = case.numels.iter().map(|numel| 4 * numel).sum();
            let given = given * u64::from(merge);
            for ((_, few), (_, many)) in few.iter().zip(&many) {
                // Of ten steps: gradients as they are given, and a control block.
                let (read, written) = ((many.0 - few.0) / 10, (many.1 - few.1) / 10);
                assert!(
                    read < 1_000 && written < given + 1_000,
                    "{read} and {written} bytes a step, of which {given} are given: {case:?}"
                );
            }
        }
    }
}

#[test]
fn gradients_that_travel_in_sixteen_bits_are_rounded_alike() {
    for world in worlds().skip(1) {
        for (reduce_dtype, zero) in
            [ReduceDType::Bf16, ReduceDType::F16].into_iter().cycle().zip(STAGES)
        {
            let case = Case { world, zero, reduce_dtype, streams: world % 2, ..small() };
            assert_same(&case);
            // Engines of the host round alike.
            let expected = case.run();
            let ranks = run_ranks(world, &Options::default(), |mut comm| {
                let backend = Counted::open(comm.rank());
                case.rank(&mut comm, &backend).params
            });
            for (rank, found) in ranks.unwrap().into_iter().enumerate() {
                assert!(found.unwrap() == expected.params, "rank {rank}: {case:?}");
            }
        }
    }
}
