//! LocalSGD with 32-bit values behind 16-bit parameters, and what ranks decide together between
//! averages.

use std::num::NonZeroU64;

use fusestep_fused_adam::Adam;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{
    Averaged, ClipByGlobalNorm, LocalSgd, LossScale, LossScaling, Optimizer, ScalePolicy,
};
use fusestep_simd::{join_bf16, narrow_bf16, split_bf16};
use fusestep_tensor::Role;
use fusestep_testkit::each_rule;

use crate::run::{Case, Mixed};
use crate::train::{Trained, train};

fn every(steps: u64) -> LocalSgd {
    LocalSgd::every(NonZeroU64::new(steps).unwrap())
}

fn case(rule: Optimizer, master: Master) -> Case {
    let precision = Precision { master, ..Precision::default() };
    Case {
        rule,
        numels: vec![130, 1_001, 0, 3],
        world: 3,
        mixed: Mixed::Yes,
        precision: Some(precision),
        steps: 1,
        ..Case::default()
    }
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    let two = bytes.as_chunks::<2>().0.iter();
    two.map(|bytes| u16::from_le_bytes(*bytes)).collect()
}

/// The 32-bit values of a bf16 parameter of one rank.
fn values(trained: &Trained, param: usize) -> Vec<f32> {
    let list = |role| trained.state[param].iter().find(|(own, _)| *own == role);
    match (list(Role::Master), list(Role::Remainder)) {
        (Some((_, bytes)), _) => {
            let four = bytes.as_chunks::<4>().0.iter();
            four.map(|bytes| f32::from_le_bytes(*bytes)).collect()
        }
        (_, Some((_, low))) => {
            let high = halves(&trained.params[param]).into_iter();
            high.zip(halves(low)).map(|(high, low)| join_bf16(high, low)).collect()
        }
        (None, None) => panic!("a master or a residual"),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn mean_of(ranks: &[Vec<f32>]) -> Vec<f32> {
    let mean = |at: usize| {
        let values = ranks.iter().map(|rank| rank[at]);
        values.reduce(|sum, value| sum + value).unwrap() / ranks.len() as f32
    };
    (0..ranks[0].len()).map(mean).collect()
}

#[test]
fn averages_are_those_of_masters_and_residuals_and_parameters_follow() {
    for rule in each_rule() {
        for master in [Master::F32, Master::Remainder] {
            let case = case(rule, master);
            // Equal steps, without an average and with one behind them.
            let alone = train(&case, &case.planner().with(every(100)));
            let found = train(&case, &case.planner().with(every(1)));
            assert!(!alone[0].reports[0].averaged && found[0].reports[0].averaged);
            for param in [1, 3] {
                let own: Vec<Vec<f32>> = alone.iter().map(|rank| values(rank, param)).collect();
                let expected = mean_of(&own);
                let text = format!("{} {master:?} {param}", rule.name());
                // Of the three elements of the other one all ranks' gradients may have one sign.
                let differ = bits(&own[0]) != bits(&own[1]);
                assert!(differ || param == 3, "{text}: ranks differ before");
                let narrowed = |values: &[f32]| -> Vec<u16> {
                    let rounded = |value: &f32| match master {
                        Master::Remainder => split_bf16(*value).0,
                        _ => narrow_bf16(*value),
                    };
                    values.iter().map(rounded).collect()
                };
                for rank in &found {
                    assert_eq!(bits(&values(rank, param)), bits(&expected), "{text}");
                    assert_eq!(halves(&rank.params[param]), narrowed(&expected), "{text}");
                }
            }
        }
    }
}

#[test]
fn what_rounds_away_in_parameters_is_not_lost_in_averages() {
    // Steps of 1e-6 are far below half a unit of bf16 parameters near 0.1; masters and residuals
    // add them up over averages.
    let rule = Adam { lr: 1e-6, ..Adam::default() };
    for master in [Master::F32, Master::Remainder] {
        let case = Case { steps: 8, ..case(rule.into(), master) };
        let found = train(&case, &case.planner().with(every(1)));
        let first = halves(&case.first_values(1)).into_iter();
        let first = first.map(|bits| f32::from_bits(u32::from(bits) << 16));
        let last = values(&found[2], 1).into_iter();
        let moved = first.zip(last).filter(|(first, last)| first != last).count();
        assert!(moved > 990, "{moved} of 1001 values moved, {master:?}");
    }
}

#[test]
fn state_is_averaged_only_where_it_is_asked_for() {
    for averaged in [Averaged::Params, Averaged::ParamsAndState] {
        for master in [Master::None, Master::F32, Master::Remainder] {
            let case = case(Adam::default().into(), master);
            let rule = LocalSgd { averaged, ..every(1) };
            let found = train(&case, &case.planner().with(rule));
            assert!(found[0].params == found[1].params && found[1].params == found[2].params);
            let kept = [Role::Master, Role::Remainder];
            for param in [0, 1, 3] {
                for (own, other) in found[0].state[param].iter().zip(&found[2].state[param]) {
                    let alike = averaged == Averaged::ParamsAndState || kept.contains(&own.0);
                    assert_eq!(own == other, alike, "{averaged:?} {master:?} {:?}", own.0);
                }
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_on_one_rank_skips_all_and_scales_stay_equal() {
    let policy = ScalePolicy { growth_interval: 2, ..ScalePolicy::default() };
    let scaling = || LossScaling::from(LossScale::with_policy(64.0, policy).unwrap());
    for (local, clip) in [(every(1), None), (every(3), Some(1.0)), (every(100), None)] {
        for bad in 0..3 {
            let case = Case {
                // Micro-steps 1 and 4 of the other ranks are as good as ever.
                infinite: Some((bad, 1, 0)),
                steps: 6,
                ..case(Adam::default().into(), Master::F32)
            };
            let planner = case.planner().with(local).with(scaling());
            let planner = match clip {
                Some(clip) => planner.with(ClipByGlobalNorm::new(clip)),
                None => planner,
            };
            let found = train(&case, &planner);
            for rank in &found {
                let updates = rank.reports.iter().map(|report| report.update.unwrap());
                let skipped: Vec<bool> = updates.clone().map(|update| update.skipped).collect();
                assert_eq!(skipped, [false, true, false, false, false, false], "{bad}");
                let steps: Vec<u64> = updates.map(|update| update.step).collect();
                assert_eq!(steps, [1, 1, 2, 3, 4, 5]);
                assert_eq!(rank.scales, found[0].scales, "rank {bad} had it");
            }
            // Halved by the skipped step, doubled after every two good ones.
            let scales: Vec<f64> = found[0].scales.iter().map(|scale| scale.unwrap()).collect();
            assert_eq!(scales, [64.0, 32.0, 32.0, 64.0, 64.0, 128.0]);
            if local == every(1) {
                assert!(found[0].params == found[2].params);
            }
        }
    }
}
