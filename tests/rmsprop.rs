//! RMSprop against PyTorch, against the f64 reference, and the slice entry against a plan and bad
//! input.

use bytemuck::pod_collect_to_vec;
use fusestep_planner::Planner;
use fusestep_rmsprop::reference::{Element, update};
use fusestep_rmsprop::{Centering, Objective, RmsProp, RmsPropTensors};
use fusestep_simd::Pool;
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use serde::Deserialize;

#[path = "support/training.rs"]
mod training;

use training::{Trained, check_errors, check_golden, differ_from_golden, errors_in_units};

/// What `tests/golden/rmsprop.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/rmsprop.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    alpha: f64,
    eps: f64,
    momentum: f64,
    weight_decay: f64,
    centered: bool,
    maximize: bool,
}

impl Settings {
    fn rmsprop(self) -> RmsProp {
        RmsProp {
            lr: self.lr,
            alpha: self.alpha,
            eps: self.eps,
            momentum: self.momentum,
            weight_decay: self.weight_decay,
            centering: if self.centered { Centering::Centered } else { Centering::MeanSquare },
            objective: if self.maximize { Objective::Maximize } else { Objective::Minimize },
        }
    }
}

#[test]
fn ten_steps_agree_with_pytorch() {
    check_golden(GOLDEN, 5, |settings: Settings| settings.rmsprop().into());
}

#[test]
fn the_golden_comparison_can_fail() {
    let right = RmsProp::default();
    let wrong = RmsProp { alpha: 0.9901, ..right };
    assert!(differ_from_golden::<f32>(GOLDEN, "rmsprop", right.into(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(GOLDEN, "rmsprop", wrong.into(), 257) > 1e-5);
    assert!(differ_from_golden::<f64>(GOLDEN, "rmsprop", wrong.into(), 257) > 1e-12);
}

#[test]
fn without_memory_the_centered_variance_is_0_and_eps_divides() {
    let rmsprop =
        RmsProp { alpha: 0.0, eps: 1.0, centering: Centering::Centered, ..RmsProp::default() };
    let mut trained = Trained::new(rmsprop.into(), &[1.0f32; 512]);
    let grads: Vec<f32> = (0..512).map(|i| 1.0 + i as f32 / 511.0).collect();
    trained.step(&grads);
    // With α = 0 the variance is g² − g·g, and p moves by lr·g / ε.
    let expected: Vec<f32> = grads.iter().map(|g| 1.0 - 0.01 * g).collect();
    assert_eq!(trained.list::<f32>(Role::Param), expected);
}

/// PyTorch takes the root of the negative number, and the parameter is NaN from then on.
#[test]
fn a_variance_that_rounds_below_0_is_0() {
    let centered = RmsProp { eps: 1e-3, centering: Centering::Centered, ..RmsProp::default() };
    // Equal gradients for long: v and a² both tend to g², from both sides of it.
    let mut trained = Trained::new(centered.into(), &[0.5f32; 64]);
    let grads: Vec<f32> = (0..64).map(|i| 0.7 + i as f32 * 0.01).collect();
    let mut below = 0;
    for _ in 0..3000 {
        trained.step(&grads);
        let v = trained.list::<f32>(Role::Moment2);
        let a = trained.list::<f32>(Role::Moment1);
        below += v.iter().zip(a).filter(|(v, a)| **v < *a * *a).count();
    }
    assert!(below > 0, "no variance rounded below 0");
    assert!(trained.list::<f32>(Role::Param).iter().all(|p| p.is_finite()));
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
fn bound_in_units(steps: u64) -> f64 {
    8.0 + steps as f64 / 32.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let mut all = Vec::new();
    for (lr, eps) in [(1e-4, 1e-8), (1e-3, 1e-4), (1e-2, 1e-8)] {
        for weight_decay in [0.0, 0.1] {
            for momentum in [0.0, 0.9] {
                for centering in [Centering::MeanSquare, Centering::Centered] {
                    all.push(RmsProp {
                        lr,
                        eps,
                        momentum,
                        weight_decay,
                        centering,
                        ..RmsProp::default()
                    });
                }
            }
        }
    }
    let errors = all.into_iter().map(|rmsprop| {
        let element = |param| Element { param, ..Element::default() };
        let next = |_, element, grad| update(&rmsprop, element, grad);
        let errors = errors_in_units(rmsprop.into(), element, next, |element| element.param);
        (format!("{rmsprop:?}"), errors)
    });
    check_errors(errors, bound_in_units);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    for (centering, momentum) in [
        (Centering::MeanSquare, 0.0),
        (Centering::MeanSquare, 0.9),
        (Centering::Centered, 0.0),
        (Centering::Centered, 0.9),
    ] {
        let rmsprop = RmsProp { centering, momentum, ..RmsProp::default() };
        let mut expected = Vec::<u8>::new();
        for index in 0..case.params.len() {
            let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
            let zeros = vec![0.0f32; param.len()];
            let mut moment2 = zeros.clone();
            let mut moment1 = (centering == Centering::Centered).then(|| zeros.clone());
            let mut velocity = rmsprop.has_velocity().then_some(zeros);
            let mut grad = Vec::new();
            for step in 1..=case.steps {
                grad = pod_collect_to_vec(&case.grad_bytes(index, step));
                let tensor = RmsPropTensors {
                    param: &mut param,
                    grad: &grad,
                    moment2: &mut moment2,
                    moment1: moment1.as_deref_mut(),
                    velocity: velocity.as_deref_mut(),
                };
                match step % 2 {
                    0 => rmsprop.step(step, &mut [tensor]).unwrap(),
                    _ => rmsprop.step_with(&pool, step, &mut [tensor]).unwrap(),
                }
            }
            let lists = [Some(param), Some(grad), Some(moment2), moment1, velocity];
            for list in lists.iter().flatten() {
                expected.extend_from_slice(bytemuck::cast_slice(list));
            }
        }
        let plan = Planner::new(rmsprop.into()).plan(&case.params).unwrap();
        let (_, backend) = backends().pop().unwrap();
        let found = outcome(&plan, &case, backend.as_ref());
        assert!(found == expected, "{rmsprop:?}");
    }
}

fn tensor<'a>(
    param: &'a mut [f32],
    grad: &'a [f32],
    moment2: &'a mut [f32],
) -> RmsPropTensors<'a, f32> {
    RmsPropTensors { param, grad, moment2, moment1: None, velocity: None }
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let good = RmsProp::default();
    let centered = RmsProp { centering: Centering::Centered, momentum: 0.9, ..good };
    let bad = RmsProp { eps: -1.0, ..good };
    for (rmsprop, step, grad, moment2, message) in [
        (good, 1, 4, 5, "grad of tensor 1: expected 5 elements, found 4"),
        (good, 1, 5, 0, "moment2 of tensor 1: expected 5 elements, found 0"),
        (good, 0, 5, 5, "step: expected at least 1, found 0; steps count from 1"),
        (
            centered,
            1,
            5,
            5,
            "moment1 of tensor 0: expected a slice, because the step is centered, found none",
        ),
        (bad, 1, 5, 5, "eps: expected a finite value of at least 0, found -1"),
    ] {
        let (mut first, mut second, mut own) = ([1.0f32; 3], [1.0f32; 5], [0.5f32; 3]);
        let (grads, mut other) = (vec![0.25f32; grad], vec![0.5f32; moment2]);
        let mut tensors =
            [tensor(&mut first, &[0.25; 3], &mut own), tensor(&mut second, &grads, &mut other)];
        let error = rmsprop.step(step, &mut tensors).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!((first, second, own), ([1.0; 3], [1.0; 5], [0.5; 3]));
    }
}
