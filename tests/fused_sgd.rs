//! SGD and momentum against PyTorch, against the f64 reference, and the slice entry against a plan
//! and bad input.

use bytemuck::pod_collect_to_vec;
use fusestep_fused_sgd::reference::{Element, update};
use fusestep_fused_sgd::{Nesterov, Objective, Sgd, SgdTensors, WeightDecay};
use fusestep_planner::Planner;
use fusestep_simd::Pool;
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use serde::Deserialize;

#[path = "support/training.rs"]
mod training;

use training::{check_errors, check_golden, differ_from_golden, errors_in_units};

/// What `tests/golden/fused_sgd.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/fused_sgd.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    weight_decay: f64,
    decay: String,
    rescale: f64,
    maximize: bool,
}

impl Settings {
    fn sgd(self) -> Sgd {
        Sgd {
            lr: self.lr,
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: if self.nesterov { Nesterov::Nesterov } else { Nesterov::Plain },
            weight_decay: match self.decay.as_str() {
                "decoupled" => WeightDecay::Decoupled(self.weight_decay),
                "l2" => WeightDecay::L2(self.weight_decay),
                other => panic!("unknown decay `{other}`"),
            },
            rescale: self.rescale,
            objective: if self.maximize { Objective::Maximize } else { Objective::Minimize },
        }
    }
}

#[test]
fn ten_steps_agree_with_pytorch() {
    check_golden(GOLDEN, 9, |settings: Settings| settings.sgd().into());
}

#[test]
fn the_golden_comparison_can_fail() {
    let right = Sgd { lr: 1e-2, ..Sgd::with_momentum() };
    let wrong = Sgd { lr: 1.00002e-2, ..right };
    let dampened = Sgd { dampening: 1e-4, ..right };
    assert!(differ_from_golden::<f32>(GOLDEN, "momentum", right.into(), 257) <= 1e-5);
    for wrong in [wrong, dampened] {
        assert!(differ_from_golden::<f32>(GOLDEN, "momentum", wrong.into(), 257) > 1e-5);
        assert!(differ_from_golden::<f64>(GOLDEN, "momentum", wrong.into(), 257) > 1e-12);
    }
}

fn configurations() -> Vec<Sgd> {
    let mut all = Vec::new();
    for lr in [1e-3, 1e-2, 1e-1] {
        for weight_decay in
            [WeightDecay::L2(0.0), WeightDecay::L2(0.1), WeightDecay::Decoupled(0.01)]
        {
            let sgd = Sgd { lr, weight_decay, ..Sgd::default() };
            let momentum = Sgd { momentum: 0.9, ..sgd };
            all.extend([
                sgd,
                momentum,
                Sgd { dampening: 0.5, rescale: 0.3, ..momentum },
                Sgd { nesterov: Nesterov::Nesterov, objective: Objective::Maximize, ..momentum },
            ]);
        }
    }
    all
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
///
/// Each step rounds the parameter once or twice, to half a unit each; what adds up without fading
/// is the rounding of the decay factor, which is applied at each step.
fn bound_in_units(steps: u64) -> f64 {
    4.0 + steps as f64 / 2.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let errors = configurations().into_iter().map(|sgd| {
        let element = |param| Element { param, ..Element::default() };
        let next = |step, element, grad| update(&sgd, step, element, grad);
        let errors = errors_in_units(sgd.into(), element, next, |element| element.param);
        (format!("{sgd:?}"), errors)
    });
    check_errors(errors, bound_in_units);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    for sgd in [Sgd::default(), Sgd::with_momentum()] {
        let mut expected = Vec::<u8>::new();
        for index in 0..case.params.len() {
            let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
            let mut velocity = vec![0.0f32; param.len()];
            let mut grad = Vec::new();
            for step in 1..=case.steps {
                grad = pod_collect_to_vec(&case.grad_bytes(index, step));
                let tensor = SgdTensors {
                    param: &mut param,
                    grad: &grad,
                    velocity: sgd.has_velocity().then_some(velocity.as_mut_slice()),
                };
                match step % 2 {
                    0 => sgd.step(step, &mut [tensor]).unwrap(),
                    _ => sgd.step_with(&pool, step, &mut [tensor]).unwrap(),
                }
            }
            expected.extend_from_slice(bytemuck::cast_slice(&param));
            expected.extend_from_slice(bytemuck::cast_slice(&grad));
            if sgd.has_velocity() {
                expected.extend_from_slice(bytemuck::cast_slice(&velocity));
            }
        }
        let plan = Planner::new(sgd.into()).plan(&case.params).unwrap();
        let (_, backend) = backends().pop().unwrap();
        assert!(outcome(&plan, &case, backend.as_ref()) == expected, "{sgd:?}");
    }
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let momentum = Sgd::with_momentum();
    let nan = Sgd { lr: f64::NAN, ..momentum };
    for (sgd, step, grad, velocity, message) in [
        (momentum, 1, 4, Some(5), "grad of tensor 1: expected 5 elements, found 4"),
        (momentum, 1, 5, Some(6), "velocity of tensor 1: expected 5 elements, found 6"),
        (
            momentum,
            1,
            5,
            None,
            "velocity of tensor 1: expected a slice, because momentum is above 0, found none",
        ),
        (
            Sgd::default(),
            1,
            5,
            Some(5),
            "velocity of tensor 1: expected none, because momentum is 0, found a slice",
        ),
        (momentum, 0, 5, Some(5), "step: expected at least 1, found 0; steps count from 1"),
        (nan, 1, 5, Some(5), "lr: expected a finite value of at least 0, found NaN"),
    ] {
        assert_eq!(refusal(sgd, step, grad, velocity), message);
    }
}

/// The message of a step on a good tensor and one of 5 elements with these lists; nothing may be
/// written.
fn refusal(sgd: Sgd, step: u64, grad: usize, velocity: Option<usize>) -> String {
    let (mut first, mut second) = ([1.0f32; 3], [1.0f32; 5]);
    let (mut own, mut other) = ([0.5f32; 3], velocity.map(|numel| vec![0.5f32; numel]));
    let grads = vec![0.25f32; grad];
    let good = SgdTensors {
        param: &mut first,
        grad: &[0.25; 3],
        velocity: sgd.has_velocity().then_some(own.as_mut_slice()),
    };
    let bad = SgdTensors { param: &mut second, grad: &grads, velocity: other.as_deref_mut() };
    let error = sgd.step(step, &mut [good, bad]).unwrap_err();
    assert_eq!((first, second, own), ([1.0; 3], [1.0; 5], [0.5; 3]));
    error.to_string()
}

#[test]
fn no_tensors_and_empty_tensors_are_a_step() {
    Sgd::default().step::<f32>(1, &mut []).unwrap();
    let empty = SgdTensors::<f64> { param: &mut [], grad: &[], velocity: Some(&mut []) };
    Sgd::with_momentum().step(1, &mut [empty]).unwrap();
}
