//! Adagrad against PyTorch, against the f64 reference, and the slice entry against a plan and bad
//! input.

use bytemuck::pod_collect_to_vec;
use fusestep_adagrad::reference::{Element, update};
use fusestep_adagrad::{Adagrad, AdagradTensors, Objective};
use fusestep_planner::Planner;
use fusestep_simd::Pool;
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use serde::Deserialize;

#[path = "support/training.rs"]
mod training;

use training::{Trained, check_errors, check_golden, differ_from_golden, errors_in_units};

/// What `tests/golden/adagrad.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/adagrad.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    lr_decay: f64,
    initial_sum: f64,
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Settings {
    fn adagrad(self) -> Adagrad {
        Adagrad {
            lr: self.lr,
            lr_decay: self.lr_decay,
            initial_sum: self.initial_sum,
            eps: self.eps,
            weight_decay: self.weight_decay,
            objective: if self.maximize { Objective::Maximize } else { Objective::Minimize },
        }
    }
}

#[test]
fn ten_steps_agree_with_pytorch() {
    check_golden(GOLDEN, 5, |settings: Settings| settings.adagrad().into());
}

#[test]
fn the_golden_comparison_can_fail() {
    let right = Adagrad::default();
    let wrong = Adagrad { initial_sum: 1e-3, ..right };
    assert!(differ_from_golden::<f32>(GOLDEN, "adagrad", right.into(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(GOLDEN, "adagrad", wrong.into(), 257) > 1e-5);
    assert!(differ_from_golden::<f64>(GOLDEN, "adagrad", wrong.into(), 257) > 1e-12);
}

#[test]
fn the_first_step_puts_the_initial_sum_under_the_square() {
    let adagrad = Adagrad { initial_sum: 0.25, ..Adagrad::default() };
    let mut trained = Trained::new(adagrad.into(), &[1.0f32]);
    for expected in [0.5, 0.75] {
        trained.step(&[0.5f32]);
        assert_eq!(trained.list::<f32>(Role::Sum), [expected]);
    }
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
///
/// The first steps are worst where lr is as large as the parameter: the roundings of root, sum,
/// quotient and product meet in the step. Later steps are smaller, and the sum's errors fade in the
/// root.
fn bound_in_units(steps: u64) -> f64 {
    4.0 + steps as f64 / 16.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let mut all = Vec::new();
    for (lr, eps) in [(1e-3, 1e-10), (1e-2, 1e-4), (1e-1, 0.0)] {
        for weight_decay in [0.0, 0.1] {
            for (lr_decay, initial_sum) in [(0.0, 0.0), (0.01, 1e-3)] {
                all.push(Adagrad {
                    lr,
                    lr_decay,
                    initial_sum,
                    eps,
                    weight_decay,
                    ..Adagrad::default()
                });
            }
        }
    }
    let errors = all.into_iter().map(|adagrad| {
        let element = |param| Element { param, ..Element::default() };
        let next = |step, element, grad| update(&adagrad, step, element, grad);
        let errors = errors_in_units(adagrad.into(), element, next, |element| element.param);
        (format!("{adagrad:?}"), errors)
    });
    check_errors(errors, bound_in_units);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    let adagrad = Adagrad::default();
    let mut expected = Vec::<u8>::new();
    for index in 0..case.params.len() {
        let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
        let mut sum = vec![0.0f32; param.len()];
        let mut grad = Vec::new();
        for step in 1..=case.steps {
            grad = pod_collect_to_vec(&case.grad_bytes(index, step));
            let tensor = AdagradTensors { param: &mut param, grad: &grad, sum: &mut sum };
            match step % 2 {
                0 => adagrad.step(step, &mut [tensor]).unwrap(),
                _ => adagrad.step_with(&pool, step, &mut [tensor]).unwrap(),
            }
        }
        for list in [&param, &grad, &sum] {
            expected.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    let plan = Planner::new(adagrad.into()).plan(&case.params).unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected);
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let good = Adagrad::default();
    let bad = Adagrad { eps: -1.0, ..good };
    for (adagrad, step, grad, sum, message) in [
        (good, 1, 4, 5, "grad of tensor 1: expected 5 elements, found 4"),
        (good, 1, 5, 0, "sum of tensor 1: expected 5 elements, found 0"),
        (good, 0, 5, 5, "step: expected at least 1, found 0; steps count from 1"),
        (bad, 1, 5, 5, "eps: expected a finite value of at least 0, found -1"),
    ] {
        let (mut first, mut second, mut own) = ([1.0f32; 3], [1.0f32; 5], [0.5f32; 3]);
        let (grads, mut other) = (vec![0.25f32; grad], vec![0.5f32; sum]);
        let error = adagrad
            .step(
                step,
                &mut [
                    AdagradTensors { param: &mut first, grad: &[0.25; 3], sum: &mut own },
                    AdagradTensors { param: &mut second, grad: &grads, sum: &mut other },
                ],
            )
            .unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!((first, second, own), ([1.0; 3], [1.0; 5], [0.5; 3]));
    }
}
