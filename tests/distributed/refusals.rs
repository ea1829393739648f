//! Settings that a state refuses, and that it stays as it was.

use fusestep_collective::Solo;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_lion::Lion;
use fusestep_planner::{Comms, Optimizer, PlanError, Run, Topology, ZeroStage};

use crate::run::{Case, whole_params};
use crate::train::{backend, on_ranks, push, start};

fn case(rule: Optimizer, world: usize) -> Case {
    Case {
        rule,
        numels: vec![130, 5_001, 0, 3],
        world,
        zero: match world {
            1 => ZeroStage::None,
            _ => ZeroStage::One,
        },
        merge: 2,
        clip: Some(1.0),
        ..Case::default()
    }
}

/// Rules that no state of the first goes on with, and whether it is for other tensors.
fn strangers() -> Vec<(Optimizer, Optimizer, bool)> {
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let plain = Sgd { momentum: 0.0, ..sgd };
    let (adam, lamb) = (Optimizer::from(Adam::default()), Lamb::default().into());
    let lars = Lars::default().into();
    vec![
        (adam, lamb, false),
        (lamb, adam, false),
        (sgd.into(), lars, false),
        (lars, sgd.into(), false),
        (adam, lars, true),
        (adam, Lion::default().into(), true),
        (sgd.into(), plain.into(), true),
    ]
}

#[test]
fn a_rule_of_other_scalars_or_tensors_is_an_error_and_changes_nothing() {
    for world in [1, 3] {
        for (rule, other, other_lists) in strangers() {
            let case = case(rule, world);
            let text = format!("{} to {}", rule.name(), other.name());
            let run = |tries: bool| {
                on_ranks(world, |comm| {
                    let backend = backend();
                    let plan = case.planner().plan_for(&case.params(), Topology::of(comm));
                    let (plan, mut comms) = (plan.unwrap(), Comms::direct(comm));
                    let mut state = start(&case, &plan, &backend);
                    for step in 0..4 {
                        if tries {
                            let error = state.set_optimizer(other).unwrap_err();
                            let lists = matches!(error, PlanError::OtherLists { .. });
                            let rules = matches!(error, PlanError::OtherRule { .. });
                            assert_eq!((lists, rules), (other_lists, !other_lists), "{text}");
                            assert!(error.to_string().contains("plan anew"), "{error}");
                            assert_eq!(state.optimizer(), &rule);
                        }
                        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                        push(&case, &mut run, step);
                        run.step().unwrap();
                    }
                    whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
                })
            };
            assert!(run(true) == run(false), "{text}");
        }
    }
}

#[test]
fn a_rule_of_other_values_is_taken_up_by_all_ranks_alike() {
    let (slow, fast) = (Adam::default(), Adam { lr: 0.5, beta1: 0.5, ..Adam::default() });
    let run = |from: Adam, to: Option<Adam>, world| {
        let case = case(from.into(), world);
        let ranks = on_ranks(world, |comm| {
            let backend = backend();
            let plan = case.planner().plan_for(&case.params(), Topology::of(comm));
            let (plan, mut comms) = (plan.unwrap(), Comms::direct(comm));
            let mut state = start(&case, &plan, &backend);
            if let Some(to) = to {
                state.set_optimizer(to.into()).unwrap();
            }
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for step in 0..4 {
                push(&case, &mut run, step);
                run.step().unwrap();
            }
            whole_params(&mut run)
        });
        ranks.into_iter().next_back().unwrap()
    };
    for world in [1, 3] {
        let expected = run(fast, None, world);
        assert!(run(slow, Some(fast), world) == expected);
        assert!(run(slow, None, world) != expected);
    }
}

#[test]
fn weights_that_are_not_above_0_and_finite_are_refused_and_the_last_good_one_counts() {
    let case = case(Adam::default().into(), 1);
    // The last are 0 or infinite in f32, in which gradients are added.
    let no_numbers = [f64::NAN, 0.0, -0.0, -1.0, f64::INFINITY, f64::NEG_INFINITY];
    let refused = [&no_numbers[..], &[1e-300, 1e-40, 4e38, f64::MAX]].concat();
    let run = |tries: &[f64]| {
        let plan = case.planner().plan(&case.params()).unwrap();
        let (backend, mut solo) = (backend(), Solo::new());
        let mut comms = Comms::direct(&mut solo);
        let mut state = start(&case, &plan, &backend);
        for step in 0..2 {
            state.set_weight(3.0 + step as f64).unwrap();
            for &weight in tries {
                let error = state.set_weight(weight).unwrap_err();
                let PlanError::Weight { found } = error else {
                    panic!("{error}");
                };
                assert_eq!(found.to_bits(), weight.to_bits());
            }
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            push(&case, &mut run, step);
            run.step().unwrap();
        }
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    };
    assert!(run(&refused) == run(&[]));
}

#[test]
fn a_weight_behind_the_first_gradient_of_a_micro_step_is_refused_and_changes_nothing() {
    let case = case(Adam::default().into(), 1);
    let run = |tries: bool| {
        let plan = case.planner().plan(&case.params()).unwrap();
        let (backend, mut solo) = (backend(), Solo::new());
        let mut comms = Comms::direct(&mut solo);
        let mut state = start(&case, &plan, &backend);
        for step in 0..4 {
            state.set_weight(3.0 + step as f64).unwrap();
            push(&case, &mut Run::of(&plan, &mut state, &backend, &mut comms), step);
            if tries {
                let error = state.set_weight(9.0).unwrap_err();
                assert_eq!(error, PlanError::WeightLate { given: 4 });
                let told = "expected before its first gradient, found behind 4 gradients; set it \
                            when the micro-step begins";
                assert!(error.to_string().ends_with(told), "{error}");
            }
            Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        }
        whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    };
    assert!(run(true) == run(false));
}
