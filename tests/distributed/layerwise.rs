//! LARS and LAMB on shards that end inside tensors: the norms, and so the bits, of whole tensors.

use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{Optimizer, Ownership, Stage, Topology, ZeroStage};

use crate::run::{Case, Mixed};

const SHARED: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

fn layerwise() -> [Optimizer; 2] {
    [Lars::default().into(), Lamb::default().into()]
}

/// Tensors of one leaf of the fixed tree (1,024 elements) and of part of one, and one of more than
/// a chunk of 65,536.
fn case(rule: Optimizer, world: usize) -> Case {
    Case {
        rule,
        numels: vec![70_001, 3, 0, 1_024, 5_000, 1_025, 257],
        world,
        cap: Some(40_000),
        ..Case::default()
    }
}

/// The most ranks of a plan that update one tensor.
fn owners(case: &Case) -> usize {
    let mut owners = vec![0; case.numels.len()];
    for rank in 0..case.world {
        let topology = Topology::new(rank, case.world).unwrap();
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        let mut own = vec![false; case.numels.len()];
        for stage in plan.stages() {
            if let Stage::Optimize(update) = stage {
                let members = &plan.storages()[update.storage].members;
                let records = update.batches.iter().flat_map(|batch| &batch.records);
                records.for_each(|record| own[members[record.tensor as usize] as usize] = true);
            }
        }
        for (owners, own) in owners.iter_mut().zip(own) {
            *owners += usize::from(own);
        }
    }
    owners.into_iter().max().unwrap()
}

#[test]
fn shards_by_elements_give_the_bits_of_one_rank_with_the_mean_gradient() {
    for world in 2..=5 {
        for rule in layerwise() {
            for (clip, streams) in [(None, 0), (Some(0.5), 2)] {
                let base = Case {
                    clip,
                    streams,
                    // A step leaves a long tensor out on all ranks, and one lacks a gradient.
                    without_gradient: (0..world)
                        .map(|rank| (rank, 1, 0))
                        .chain([(0, 2, 4)])
                        .collect(),
                    ..case(rule, world)
                };
                let expected = base.by_hand();
                for zero in SHARED {
                    let case = Case { zero, ..base.clone() };
                    assert!(owners(&case) > 1, "a tensor has several owners: {case:?}");
                    let found = case.run();
                    assert!(found.params == expected.params, "{case:?}");
                    for (found, expected) in found.reports.iter().zip(&expected.reports) {
                        let bits = |norm: Option<f64>| norm.map(f64::to_bits);
                        assert_eq!(bits(found.grad_norm), bits(expected.grad_norm));
                    }
                }
            }
        }
    }
}

#[test]
fn every_cut_gives_the_same_bits() {
    for rule in layerwise() {
        let base = case(rule, 3);
        let expected = base.by_hand();
        for cap in [None, Some(4_096), Some(20_000), Some(1 << 20)] {
            for ownership in [Ownership::Elements, Ownership::Tensors] {
                let case = Case { cap, ownership, zero: ZeroStage::Two, ..base.clone() };
                assert!(case.run().params == expected.params, "{case:?}");
            }
        }
    }
}

#[test]
fn masters_and_residuals_of_bf16_tensors_give_the_same_bits_in_shards() {
    for rule in layerwise() {
        for (master, state) in [
            (Master::None, StateDType::Compute),
            (Master::F32, StateDType::Bf16),
            (Master::Remainder, StateDType::Compute),
        ] {
            let precision = Precision { master, state, ..Precision::default() };
            for world in [2, 3, 5] {
                let base = Case {
                    mixed: Mixed::Yes,
                    precision: Some(precision),
                    merge: 2,
                    ..case(rule, world)
                };
                let expected = base.run();
                for zero in SHARED {
                    let case = Case { zero, ..base.clone() };
                    assert!(case.run().params == expected.params, "{case:?}");
                }
            }
        }
    }
}

#[test]
fn a_tensor_whose_norm_is_not_finite_is_left_alone_on_all_ranks() {
    for rule in layerwise() {
        let base = Case { infinite: Some((1, 1, 0)), ..case(rule, 3) };
        let expected = base.by_hand();
        assert_eq!(expected.reports[1].tensors_skipped, 1);
        for zero in SHARED {
            let case = Case { zero, ..base.clone() };
            let found = case.run();
            assert!(found.params == expected.params, "{case:?}");
            // Rank 0 has a part of the tensor.
            assert_eq!(found.reports[1].tensors_skipped, 1, "{case:?}");
        }
    }
}
