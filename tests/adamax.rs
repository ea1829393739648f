//! Adamax against PyTorch, the f64 reference, a plan and bad input.

use fusestep_adamax::{Adamax, AdamaxTensors};
use fusestep_tensor::Role;

#[path = "support/element_rule.rs"]
mod element_rule;
#[path = "support/training.rs"]
mod training;

use element_rule::{Slices, check_pytorch, check_reference, check_slices};
use training::Trained;

/// Numbers that `tests/golden/adamax.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/adamax.safetensors");

#[test]
fn ten_steps_agree_with_pytorch_and_those_of_other_settings_do_not() {
    let right = Adamax::default();
    check_pytorch(GOLDEN, 4, "adamax", right, Adamax { beta1: 0.9001, ..right });
}

#[test]
fn errors_against_the_reference_stay_within_the_stated_bound() {
    let settings = [(1e-4, 1e-8, 0.0), (1e-3, 1e-4, 0.1), (1e-2, 1e-8, 0.1)];
    let rules = settings.map(|(lr, eps, weight_decay)| Adamax {
        lr,
        eps,
        weight_decay,
        ..Adamax::default()
    });
    check_reference(rules, |steps| 4.0 + steps as f64 / 4.0);
}

#[test]
fn slices_give_the_bits_of_a_plan_with_any_team() {
    let adamax = Adamax { weight_decay: 0.1, ..Adamax::default() };
    check_slices(adamax, |Slices { pool, step, param, grad, state: [moment1, max_grad] }| {
        let tensors = &mut [AdamaxTensors { param, grad, moment1, max_grad }];
        match pool {
            Some(pool) => adamax.step_with(pool, step, tensors),
            None => adamax.step(step, tensors),
        }
    });
}

/// PyTorch's `maximum` keeps NaN of either side, too.
#[test]
fn nan_stays_in_the_largest_gradient() {
    let mut trained = Trained::new(Adamax::default().into(), &[0.5f32; 3]);
    trained.step(&[0.25, f32::NAN, 0.0]);
    trained.step(&[0.5f32, 0.5, 0.0]);
    let largest = trained.list::<f32>(Role::MaxGrad);
    assert!(largest[0] == 0.5 && largest[1].is_nan(), "{largest:?}");
    assert_eq!(trained.list::<f32>(Role::Param)[2], 0.5);
}
