//! Schedule-Free AdamW against its authors' package, against the f64 reference, and the slice entry
//! against a plan and bad input.

use bytemuck::pod_collect_to_vec;
use fusestep_planner::Planner;
use fusestep_schedule_free::reference::{Element, update};
use fusestep_schedule_free::{ScheduleFree, ScheduleFreeTensors};
use fusestep_simd::Pool;
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, backends, outcome};
use safetensors::SafeTensors;
use serde::Deserialize;

#[path = "support/training.rs"]
mod training;

use training::{Trained, check_errors, check_golden, differ_from_golden, errors_in_units};

/// What `tests/golden/schedule_free.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/schedule_free.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Clone, Copy, Deserialize)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    warmup_steps: u32,
}

impl Settings {
    fn rule(self) -> ScheduleFree {
        ScheduleFree {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            warmup_steps: self.warmup_steps,
        }
    }
}

#[test]
fn ten_steps_agree_with_the_authors_package() {
    check_golden(GOLDEN, 5, |settings: Settings| settings.rule().into());
}

#[test]
fn the_golden_comparison_can_fail() {
    let right = ScheduleFree::default();
    let wrong = ScheduleFree { beta1: 0.901, ..right };
    assert!(differ_from_golden::<f32>(GOLDEN, "schedule_free", right.into(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(GOLDEN, "schedule_free", wrong.into(), 257) > 1e-5);
    assert!(differ_from_golden::<f64>(GOLDEN, "schedule_free", wrong.into(), 257) > 1e-12);
}

/// The package moves the parameter there in eval mode.
#[test]
fn averages_agree_with_the_authors_package() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(GOLDEN).unwrap();
    let read = |name: String| pod_collect_to_vec::<u8, f64>(golden.tensor(&name).unwrap().data());
    let mut compared = 0;
    for (key, settings) in header.metadata().as_ref().unwrap() {
        let Some(case) = key.strip_prefix("case.") else {
            continue;
        };
        let rule = serde_json::from_str::<Settings>(settings).unwrap().rule();
        let list = |list: &str| read(format!("{case}.f64.257.{list}.10"));
        let (param, base) = (list("param"), list("base"));
        let mut found = vec![0.0; param.len()];
        rule.average(&param, &base, &mut found).unwrap();
        for (found, expected) in found.into_iter().zip(list("average")) {
            assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1e-3));
            compared += 1;
        }
        let error = rule.average(&param, &base[1..], &mut vec![0.0; 257]);
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "base of tensor 0: expected 257 elements, found 256");
    }
    assert_eq!(compared, 5 * 257);
}

#[test]
fn the_first_step_starts_z_at_the_parameter_whatever_it_was() {
    let rule = ScheduleFree { lr: 0.0, ..ScheduleFree::default() };
    let mut trained = Trained::new(rule.into(), &[0.75f32; 5]);
    trained.step(&[1.0f32; 5]);
    assert_eq!(trained.list::<f32>(Role::Base), [0.75; 5]);
    assert_eq!(trained.list::<f32>(Role::Param), [0.75; 5]);
}

/// Units in the last place that `steps` f32 steps may be away from the reference; `README.md` of
/// the kernel states the same.
fn bound_in_units(steps: u64) -> f64 {
    8.0 + steps as f64 / 16.0
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let mut all = Vec::new();
    for (lr, eps) in [(1e-4, 1e-8), (1e-3, 1e-4), (1e-2, 1e-8)] {
        for weight_decay in [0.0, 0.1] {
            for (beta1, warmup_steps) in [(0.9, 0), (0.95, 20), (0.5, 3)] {
                all.push(ScheduleFree {
                    lr,
                    eps,
                    beta1,
                    weight_decay,
                    warmup_steps,
                    ..ScheduleFree::default()
                });
            }
        }
    }
    let errors = all.into_iter().map(|rule| {
        let element = |param| Element { param, ..Element::default() };
        let next = |step, element, grad| update(&rule, step, element, grad);
        let errors = errors_in_units(rule.into(), element, next, |element| element.param);
        (format!("{rule:?}"), errors)
    });
    check_errors(errors, bound_in_units);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap());
    let rule = ScheduleFree { warmup_steps: 2, weight_decay: 0.1, ..ScheduleFree::default() };
    let mut expected = Vec::<u8>::new();
    for index in 0..case.params.len() {
        let mut param: Vec<f32> = pod_collect_to_vec(&case.param_bytes(index));
        let (mut moment2, mut base) = (vec![0.0f32; param.len()], vec![0.0f32; param.len()]);
        let mut grad = Vec::new();
        for step in 1..=case.steps {
            grad = pod_collect_to_vec(&case.grad_bytes(index, step));
            let tensor = ScheduleFreeTensors {
                param: &mut param,
                grad: &grad,
                moment2: &mut moment2,
                base: &mut base,
            };
            match step % 2 {
                0 => rule.step(step, &mut [tensor]).unwrap(),
                _ => rule.step_with(&pool, step, &mut [tensor]).unwrap(),
            }
        }
        for list in [&param, &grad, &moment2, &base] {
            expected.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    let plan = Planner::new(rule.into()).plan(&case.params).unwrap();
    let (_, backend) = backends().pop().unwrap();
    assert!(outcome(&plan, &case, backend.as_ref()) == expected);
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let good = ScheduleFree::default();
    let bad = ScheduleFree { beta1: 0.0, ..good };
    for (rule, step, grad, base, message) in [
        (good, 1, 4, 5, "grad of tensor 0: expected 5 elements, found 4"),
        (good, 1, 5, 0, "base of tensor 0: expected 5 elements, found 0"),
        (good, 0, 5, 5, "step: expected at least 1, found 0; steps count from 1"),
        (bad, 1, 5, 5, "beta1: expected a value in (0, 1), found 0"),
    ] {
        let (mut param, mut moment2) = ([1.0f32; 5], [0.5f32; 5]);
        let (grad, mut base) = (vec![0.25f32; grad], vec![0.5f32; base]);
        let tensor = ScheduleFreeTensors {
            param: &mut param,
            grad: &grad,
            moment2: &mut moment2,
            base: &mut base,
        };
        let error = rule.step(step, &mut [tensor]).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!((param, moment2), ([1.0; 5], [0.5; 5]));
    }
}
