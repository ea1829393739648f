//! Ranks on devices whose state is in int8: shards end between groups there as on the host.

use std::num::{NonZeroU64, NonZeroUsize};

use fusestep::lion::Lion;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{Averaged, LocalSgd, Optimizer, Ownership, ReducedWhen};

use crate::laws::assert_same;
use crate::run::{Case, Mixed, lacking};
use crate::worlds::{STAGES, gpus, small, worlds};

/// Tensors at the border of int8, with groups that end early, and one on several ranks.
fn coded() -> Case {
    Case {
        numels: vec![7_001, 4_095, 0, 31, 4_097, 20_000, 4_096],
        cap: Some(30_001),
        state: StateDType::Int8,
        steps: 3,
        ..small()
    }
}

fn kept(master: Master) -> Case {
    let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
    Case { mixed: Mixed::Yes, precision: Some(precision), ..coded() }
}

#[test]
fn every_stage_and_world_gives_the_bits_of_threads_on_the_host() {
    for world in worlds() {
        for zero in STAGES {
            for streams in [0, 2] {
                assert_same(&Case { world, zero, streams, ..coded() });
            }
        }
    }
}

#[test]
fn every_kind_of_rule_gives_the_bits_of_threads_on_the_host() {
    let rules: [Optimizer; 5] = [
        Adam { second_moment: SecondMoment::Largest, ..Adam::default() }.into(),
        Lamb::default().into(),
        Lars::default().into(),
        Lion::default().into(),
        Sgd { momentum: 0.9, ..Sgd::default() }.into(),
    ];
    for rule in rules {
        for world in worlds().skip(1) {
            for (zero, clip) in STAGES.into_iter().zip([None, Some(0.5)].into_iter().cycle()) {
                assert_same(&Case { rule, world, zero, clip, ..coded() });
            }
        }
    }
}

#[test]
fn parameters_of_bf16_and_their_further_bits_share_out_alike() {
    for master in [Master::None, Master::F32, Master::Remainder, Master::Remainder8] {
        for world in worlds() {
            for zero in STAGES {
                assert_same(&Case { world, zero, streams: world % 2, ..kept(master) });
            }
        }
    }
}

#[test]
fn clipping_loss_scales_and_micro_steps_change_nothing_else() {
    for world in worlds().skip(1) {
        for zero in STAGES {
            let case = Case { world, zero, streams: 1, ..kept(Master::Remainder8) };
            assert_same(&Case {
                clip: Some(0.5),
                scaled: Some(1024.0),
                infinite: Some((world - 1, 1, 4)),
                without_gradient: lacking(world, 1),
                ..case.clone()
            });
            for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
                let without_gradient = lacking(world, 2);
                assert_same(&Case { merge: 2, reduced, without_gradient, ..case.clone() });
            }
        }
    }
}

#[test]
fn groups_of_ranks_and_owners_of_whole_tensors_give_the_same_bits() {
    for zero in STAGES.into_iter().skip(1) {
        for world in worlds().skip(1) {
            let ownership = Ownership::Tensors;
            assert_same(&Case { world, zero, ownership, ..coded() });
        }
        if gpus() >= 4 {
            let shard_group = NonZeroUsize::new(2);
            assert_same(&Case { world: 4, zero, shard_group, clip: Some(0.5), ..coded() });
        }
    }
}

#[test]
fn averages_of_state_are_those_of_threads_on_the_host() {
    let every = LocalSgd::every(NonZeroU64::new(2).unwrap());
    let with_state = LocalSgd { averaged: Averaged::ParamsAndState, ..every };
    for world in worlds().skip(1) {
        for rule in [every, with_state] {
            for case in [coded(), kept(Master::Remainder8)] {
                assert_same(&Case { world, local_sgd: Some(rule), steps: 5, ..case });
            }
        }
    }
}
