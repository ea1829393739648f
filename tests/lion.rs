//! Lion against an independent script, against the f64 reference, and the slice entry against a
//! plan and bad input.

use bytemuck::pod_collect_to_vec;
use fusestep_lion::reference::{Element, update};
use fusestep_lion::{Lion, LionTensors, Objective};
use fusestep_planner::Planner;
use fusestep_simd::Pool;
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use serde::Deserialize;

#[path = "support/training.rs"]
mod training;

use training::{Trained, check_errors, check_golden, differ_from_golden, errors_in_units};

/// What `tests/golden/lion.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/lion.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Settings {
    fn lion(self) -> Lion {
        Lion {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            weight_decay: self.weight_decay,
            objective: if self.maximize { Objective::Maximize } else { Objective::Minimize },
        }
    }
}

#[test]
fn ten_steps_agree_with_the_papers_algorithm_in_numpy() {
    check_golden(GOLDEN, 5, |settings: Settings| settings.lion().into());
}

#[test]
fn the_golden_comparison_can_fail() {
    let right = Lion { lr: 1e-3, ..Lion::default() };
    let wrong = Lion { beta2: 0.9901, ..right };
    assert!(differ_from_golden::<f32>(GOLDEN, "lion", right.into(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(GOLDEN, "lion", wrong.into(), 257) > 1e-5);
    assert!(differ_from_golden::<f64>(GOLDEN, "lion", wrong.into(), 257) > 1e-12);
}

#[test]
fn a_direction_of_zero_does_not_move_and_nan_stays_nan() {
    let lion = Lion { lr: 0.5, ..Lion::default() };
    let mut trained = Trained::new(lion.into(), &[1.0f32; 5]);
    trained.step(&[0.0f32, -0.0, 1e-45, -1e-45, f32::NAN]);
    let found = trained.list::<f32>(fusestep_tensor::Role::Param);
    // (1 − β₁)·g of the smallest subnormals rounds to zero, which has no sign to follow.
    assert_eq!(found[..4], [1.0, 1.0, 1.0, 1.0]);
    assert!(found[4].is_nan());
    trained.step(&[1e-30f32, -1e-30, f32::INFINITY, -3.0, 0.0]);
    let found = trained.list::<f32>(fusestep_tensor::Role::Param);
    assert_eq!(found[..4], [0.5, 1.5, 0.5, 1.5]);
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
///
/// A step rounds lr once for all steps and the parameter twice; both add up. A sign that rounding
/// decides would cost 2·lr more and is left out of the bound: it takes a direction that cancels to
/// the last digits.
fn bound_in_units(steps: u64) -> f64 {
    4.0 + steps as f64 / 2.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let mut all = Vec::new();
    for lr in [1e-4, 1e-3, 1e-2] {
        for weight_decay in [0.0, 0.1, 1.0] {
            for (beta1, beta2) in [(0.9, 0.99), (0.95, 0.98)] {
                all.push(Lion { lr, beta1, beta2, weight_decay, ..Lion::default() });
            }
        }
    }
    let errors = all.into_iter().map(|lion| {
        let element = |param| Element { param, ..Element::default() };
        let next = |_, element, grad| update(&lion, element, grad);
        let errors = errors_in_units(lion.into(), element, next, |element| element.param);
        (format!("{lion:?}"), errors)
    });
    check_errors(errors, bound_in_units);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    let lion = Lion::default();
    let mut expected = Vec::<u8>::new();
    for index in 0..case.params.len() {
        let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
        let mut moment1 = vec![0.0f32; param.len()];
        let mut grad = Vec::new();
        for step in 1..=case.steps {
            grad = pod_collect_to_vec(&case.grad_bytes(index, step));
            let tensor = LionTensors { param: &mut param, grad: &grad, moment1: &mut moment1 };
            match step % 2 {
                0 => lion.step(step, &mut [tensor]).unwrap(),
                _ => lion.step_with(&pool, step, &mut [tensor]).unwrap(),
            }
        }
        for list in [&param, &grad, &moment1] {
            expected.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    let plan = Planner::new(lion.into()).plan(&case.params).unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected);
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let good = Lion::default();
    let bad = Lion { beta1: 1.0, ..good };
    for (lion, step, grad, moment1, message) in [
        (good, 1, 4, 5, "grad of tensor 1: expected 5 elements, found 4"),
        (good, 1, 5, 0, "moment1 of tensor 1: expected 5 elements, found 0"),
        (good, 0, 5, 5, "step: expected at least 1, found 0; steps count from 1"),
        (bad, 1, 5, 5, "beta1: expected a value in [0, 1), found 1"),
    ] {
        let (mut first, mut second, mut own) = ([1.0f32; 3], [1.0f32; 5], [0.5f32; 3]);
        let (grads, mut other) = (vec![0.25f32; grad], vec![0.5f32; moment1]);
        let error = lion
            .step(
                step,
                &mut [
                    LionTensors { param: &mut first, grad: &[0.25; 3], moment1: &mut own },
                    LionTensors { param: &mut second, grad: &grads, moment1: &mut other },
                ],
            )
            .unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!((first, second, own), ([1.0; 3], [1.0; 5], [0.5; 3]));
    }
}
